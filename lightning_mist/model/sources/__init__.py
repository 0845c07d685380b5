"""Modules and batches from a text: a preset, a configuration, a file of the user's own."""

from lightning_mist.model.sources.open_model import open_model, parameter_dtype, precision_context
from lightning_mist.model.sources.reference_decoder import LanguageModel

__all__ = ["LanguageModel", "open_model", "parameter_dtype", "precision_context"]
