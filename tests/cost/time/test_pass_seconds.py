"""Passes of many stages at once; that each of them is its rows one after another, test_offload_seconds shows."""

import numpy as np
import pytest

from lightning_mist.cost.inputs.regions import StageRegions
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.cost.time.pass_seconds import Passes, RowLists
from lightning_mist.hardware.profile import CHANNELS
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_program import Channel
from tests.cost.time.test_offload_loads import loads
from tests.cost.time.test_offload_seconds import candidates
from tests.specs import spec

ALTERNATING = spec(6, kinds=(0, 1) * 3, widths=(1000, 2500), parameter_bytes=40_000, edge_bytes=120_000)


def test_the_table_speaks_of_the_channels_of_devices():
    assert tuple(channel.name.lower() for channel in Channel) == CHANNELS


@pytest.mark.parametrize("checkpointed", [0, 2, 6])
def test_units_with_equal_loads_and_neighbours_have_one_row(checkpointed):
    uses = spec(20, parameter_bytes=40_000, edge_bytes=120_000)
    some = candidates((0, 20), checkpointed=checkpointed, parameters=0.5, activations=1.0)
    found, _ = loads(some, uses)
    lists = RowLists.of(found, StageRegions.of(uses, some))
    assert lists.count_JA.sum() == 22
    # Head, tail, their neighbours, one between, and as many at either end of the recomputed layers.
    assert len(lists.row_JA) <= 6 + 4 * (0 < checkpointed < 20)
    units = np.repeat(lists.unit_I[lists.row_JA[:, 0]], lists.count_JA[:, 0].astype(int))
    for unit, like in enumerate(units):
        around = slice(unit, unit + BEFORE + BEHIND + 1), slice(like, like + BEFORE + BEHIND + 1)
        assert (found.seconds_WQR[:, :, around[0]] == found.seconds_WQR[:, :, around[1]]).all()


@pytest.mark.parametrize("checkpointed", [0, 2, 6])
def test_without_copies_passes_are_what_is_computed(checkpointed):
    some = candidates((0, 6), checkpointed=checkpointed, parameters=1.0, activations=1.0)
    found, rows = loads(some, ALTERNATING)
    passes = Passes(found, rows, StageRegions.of(ALTERNATING, some), FREE, False)
    again = found["forward"][0, BEFORE + 1 : BEFORE + 1 + checkpointed].sum()
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    assert passes.seconds(forward, copies=False) == pytest.approx(found["forward"].sum())
    assert passes.seconds(backward, copies=False) == pytest.approx(found["backward"].sum() + again)
    # All hides but what a batch begins with.
    moving = passes.seconds(forward, copies=True)
    assert passes.seconds(forward, copies=True, edge=True) > moving >= passes.seconds(forward, copies=False)
    assert passes.seconds(backward, copies=True) >= passes.seconds(backward, copies=False)
