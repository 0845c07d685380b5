"""Networks that are known by name: language models by their sizes, and their specs without a trace."""

from lightning_mist.model.presets.asked_models import check_name, read_configuration
from lightning_mist.model.presets.named_models import PRESETS, check_length, check_precision
from lightning_mist.model.presets.shapes import LanguageModelShape
from lightning_mist.model.presets.specs import KNOWN_OPTIMIZERS, preset_spec
