"""Where a module can be cut into layers, and why not elsewhere."""

from lightning_mist.model.cuts.blocks import find_blocks
from lightning_mist.model.cuts.compiled_parts import compiled_exclusions, compiled_text, is_compiled_block
from lightning_mist.model.cuts.mapping import map_module
