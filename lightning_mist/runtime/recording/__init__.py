"""Measured seconds and bytes of a run."""

from lightning_mist.runtime.recording.action_recorder import Recorded, Recorder
from lightning_mist.runtime.recording.meter import meter_memory, state_tensors
