"""Allocation events of a whole step, stacked from those of its parts, and their peaks."""

from lightning_mist.model.events.event_peaks import PartPeaks, part_peaks
from lightning_mist.model.events.event_stacking import timeline_of

__all__ = ["PartPeaks", "part_peaks", "timeline_of"]
