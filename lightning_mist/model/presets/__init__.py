"""Networks that are known by name: language models by their sizes, and their specs without a trace."""

from lightning_mist.model.presets.named_models import (
    PRESETS,
    SIZE_NAMES,
    LanguageModelShape,
    check_length,
    check_name,
    check_precision,
    read_configuration,
)
from lightning_mist.model.presets.specs import KNOWN_OPTIMIZERS, preset_spec
