"""Where a module can be cut into layers, and why not elsewhere."""

from lightning_mist.model.cuts.mapping import (
    compiled_exclusions,
    compiled_text,
    find_blocks,
    is_compiled_block,
    map_module,
)
