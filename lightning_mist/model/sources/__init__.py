"""Modules and batches from a text: a preset, a configuration, a file of the user's own."""

from lightning_mist.model.sources.reference_decoder import LanguageModel
from lightning_mist.model.sources.text_sources import open_model, parameter_dtype, precision_context, with_adapters
