"""Seconds of layers and of the optimizer, measured where they will run."""

from lightning_mist.model.timing.layer_timing import attach_seconds, measured_sizes, time_layers
from lightning_mist.model.timing.optimizer_timing import time_update
