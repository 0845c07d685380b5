"""Measured seconds and bytes of a run."""

from lightning_mist.runtime.recording.meter import meter_memory, state_tensors
from lightning_mist.runtime.recording.recorder import Recorded, Recorder

__all__ = ["Recorded", "Recorder", "meter_memory", "state_tensors"]
