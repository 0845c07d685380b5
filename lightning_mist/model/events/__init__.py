"""Allocation events of a whole step, stacked from those of its parts, and their peaks."""

from lightning_mist.model.events.event_peaks import (
    Lifetime,
    StepPeaks,
    part_peaks,
    peaks_of,
    selective_peaks,
    timeline_of,
)
from lightning_mist.model.events.microbatch_events import (
    EventTape,
    Label,
    Mark,
    PartRun,
    StageShape,
    StageTemplate,
    TapeBlock,
    WeightGradient,
    stack,
)
