"""Peaks from events, against those that a trace counts."""

import pytest
import torch

from lightning_mist.model import trace_model
from lightning_mist.model.events.event_peaks import part_peaks
from tests import zoo

NAMES = ("forward", "backward", "first_backward", "recompute_backward", "first_recompute_backward")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["nano", "nano_dropout"])
def test_peaks_are_those_of_the_trace(name):
    module, make_batch = zoo.make(name)
    spec = trace_model(module, make_batch(2), optimizer=torch.optim.AdamW)
    assert len(spec.layers) == 1
    parts = (spec.head, spec.layers[0], spec.tail)
    found = part_peaks(*(part.events for part in parts))
    for part, peaks in zip(parts, found, strict=True):
        for each in NAMES:
            assert peaks[f"{each}_peak_bytes"] == getattr(part, f"{each}_peak_bytes")
