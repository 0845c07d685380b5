"""Sums of terms: which of them are part of the steady and of the boundary time."""

from dataclasses import fields

import numpy as np

from lightning_mist.cost.time.stage_seconds import StageSeconds

STEADY = {
    "forward_K",
    "backward_K",
    "recompute_K",
    "transfer_K",
    "unshard_K",
    "scatter_K",
    "ring_K",
    "copies_K",
    "overhead_K",
}
OF_OTHERS = {"transfer_K", "tied_K"}
"""What is exchanged with other stages."""

BOUNDARY = {"reduce_K", "tied_K", "update_K", "update_copies_K", "gather_K", "once_K"}


def test_every_term_counts_once_or_is_a_part_of_one_that_does():
    names = [field.name for field in fields(StageSeconds)]
    assert set(names) >= STEADY | BOUNDARY
    assert not STEADY & BOUNDARY
    for name in names:
        # One second of this term and nothing of any other.
        found = StageSeconds(**{item: np.array([float(item == name)]) for item in names})
        assert found.steady_K.tolist() == [float(name in STEADY)]
        assert found.own_times_K.tolist() == [[float(name in of - OF_OTHERS)] for of in (STEADY, BOUNDARY)]
        assert found.exchanged_times_K.tolist() == [[float(name in of & OF_OTHERS)] for of in (STEADY, BOUNDARY)]
        assert found.boundary_K.tolist() == [float(name in BOUNDARY)]
