"""Passes of many stages at once; that each of them is its rows one after another, test_offload_seconds shows."""

from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost.inputs.regions import StageRegions
from lightning_mist.cost.time.offload_loads import BEFORE, BEHIND, Loads
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.cost.time.pass_seconds import Passes, PassKind, RowLists
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import CHANNELS, COEFFICIENTS, seconds_together, speed_table
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.stage_program import Channel, StageUnits, lines_of, update_rows
from tests.cost.time.test_offload_loads import loads as loads_of_candidates
from tests.cost.time.test_offload_seconds import candidates
from tests.specs import spec
from tests.tiers import examples

ALTERNATING = spec(6, kinds=(0, 1) * 3, widths=(1000, 2500), parameter_bytes=40_000, edge_bytes=120_000)


def test_the_table_speaks_of_the_channels_of_devices():
    assert tuple(channel.name.lower() for channel in Channel) == CHANNELS


@pytest.mark.parametrize("checkpointed", [0, 2, 6])
def test_units_with_equal_loads_and_neighbours_have_one_row(checkpointed):
    uses = spec(20, parameter_bytes=40_000, edge_bytes=120_000)
    some = candidates((0, 20), checkpointed=checkpointed, parameters=0.5, activations=1.0)
    found, _ = loads_of_candidates(some, uses)
    lists = RowLists.of(found, StageRegions.of(uses, some))
    assert lists.count_RJ.sum() == 22
    # Head, tail, their neighbours, one between, and as many at either end of the recomputed layers.
    assert len(lists.row_RJ) <= 6 + 4 * (0 < checkpointed < 20)
    units = np.repeat(lists.unit_of_row[lists.row_RJ[:, 0]], lists.count_RJ[:, 0].astype(int))
    for unit, like in enumerate(units):
        around = slice(unit, unit + BEFORE + BEHIND + 1), slice(like, like + BEFORE + BEHIND + 1)
        assert (found.seconds_by_name_JR[:, :, around[0]] == found.seconds_by_name_JR[:, :, around[1]]).all()


@pytest.mark.parametrize("checkpointed", [0, 2, 6])
def test_without_copies_passes_are_what_is_computed(checkpointed):
    some = candidates((0, 6), checkpointed=checkpointed, parameters=1.0, activations=1.0)
    found, rows = loads_of_candidates(some, ALTERNATING)
    passes = Passes(found, rows, StageRegions.of(ALTERNATING, some), FREE, False)
    again = found["forward"][0, BEFORE + 1 : BEFORE + 1 + checkpointed].sum()
    forward, backward = PassKind(ActionKind.FORWARD), PassKind(ActionKind.BACKWARD)
    assert passes.seconds(forward) == pytest.approx(found["forward"].sum())
    assert passes.seconds(backward) == pytest.approx(found["backward"].sum() + again)
    # All hides but what a batch begins with.
    with_copies = replace(forward, copies=True)
    moving = passes.seconds(with_copies)
    assert passes.seconds(replace(with_copies, edge=True)) > moving >= passes.seconds(forward)
    assert passes.seconds(replace(backward, copies=True)) >= passes.seconds(backward)


AHEAD = {
    ActionKind.LOAD_OPTIMIZER_STATE: (Channel.TO_DEVICE, "state_in"),
    ActionKind.UPDATE: (Channel.COMPUTE, "update"),
    ActionKind.GATHER_PARAMETERS: (Channel.NETWORK, "gather"),
    ActionKind.UNSHARD: (Channel.TO_DEVICE, "parameters_in"),
    ActionKind.REDUCE_GRADIENTS: (Channel.NETWORK, "scatter"),
    ActionKind.STORE_ACTIVATIONS: (Channel.TO_HOST, "kept_out"),
    ActionKind.LOAD_ACTIVATIONS: (Channel.TO_DEVICE, "kept_in"),
}
"""What is under way beside the computation that follows it."""

OWN = {
    ActionKind.STORE_OPTIMIZER_STATE: (Channel.TO_HOST, "state_out"),
    ActionKind.LOAD_GRADIENTS: (Channel.TO_DEVICE, "gradients_in"),
    ActionKind.STORE_GRADIENTS: (Channel.TO_HOST, "gradients_out"),
}
"""What counts beside the computation of its own unit."""


def walked(lines, seconds, together, *, waits):
    """Seconds of the lines of one pass, one after another.

    Args:
        seconds: Those of a load of a unit.
        waits: Whether computing waits for parameters that are fetched.
    """
    computed = [line.unit for line in lines if line.kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    total, waited, begun, beside = 0.0, 0.0, False, np.zeros(len(Channel))
    for line in lines:
        if line.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            beside[Channel.COMPUTE] += seconds(line.kind.name.lower(), line.unit)
            for own in (item for item in lines if item.unit == line.unit and item.kind in OWN):
                # Nobody waits for gradients that leave behind the last computation.
                if own.kind is not ActionKind.STORE_GRADIENTS or own.unit != computed[-1]:
                    channel, name = OWN[own.kind]
                    beside[channel] += seconds(name, own.unit)
            total += together(beside) + waited
            waited, begun, beside = 0.0, True, np.zeros(len(Channel))
        elif line.kind in AHEAD:
            channel, name = AHEAD[line.kind]
            load = seconds(name, line.unit)
            if line.kind is ActionKind.UNSHARD:
                given = seconds("unshard", line.unit)
                total += 0.0 if begun or line.unit != computed[0] else given
                beside[Channel.NETWORK] += given if begun or line.unit != computed[0] else 0.0
            if not begun and line.unit == computed[0]:  # nothing is in front of it to hide behind
                beside[channel] += load if line.kind is ActionKind.UPDATE else 0.0
                total += together(beside) if line.kind is ActionKind.UPDATE else load
                beside = np.zeros(len(Channel)) if line.kind is ActionKind.UPDATE else beside
            elif line.kind is ActionKind.UNSHARD and waits:
                waited += load
            else:
                beside[channel] += load
    return total + beside.sum()


KEPT = [f"{last}{layer}_{way}" for last in ("", "last_") for layer in ("saved", "checkpoint") for way in ("in", "out")]
LOADS = {
    "sharded": ("parameters_in", "frozen_in", "unshard"),
    "activations": KEPT,
    "gradients": ("gradients_in", "gradients_out"),
    "reduced": ("scatter",),
    "update": ("update", "state_in", "state_out"),
    "given": ("gather",),
}


@given(
    units=st.integers(1, 6),
    recomputed=st.integers(0, 5),
    moved=st.sets(st.sampled_from(list(LOADS)), min_size=1),
    waits=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(200))
def test_lists_that_are_executed_take_what_their_rows_take(units, recomputed, moved, waits, seed):
    rng, order, again = np.random.default_rng(seed), tuple(range(units)), range(1, 1 + min(recomputed, units - 1))
    has = {name: frozenset(order) for name in moved & {"sharded", "activations", "gradients", "reduced"}}
    keys, of_stage = [(0, unit) for unit in order], StageUnits(order=order, **has)
    update = update_rows(keys, {"O": keys}, gathers="given" in moved) if "update" in moved else ()
    listed = [Action(0, kind, index) for index in range(3) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
    first, _, forward, backward, *_ = lines_of(listed, {0: of_stage}, update)
    there = {"forward", "backward", "again", *(name for what in moved for name in LOADS[what])}
    values = {
        name: rng.uniform(size=(1, units)) * (name in there)
        for name in ("forward", "backward", "again", "unshard", "reduce", *chain.from_iterable(LOADS.values()))
    }
    interference = Interference(**{name: rng.uniform() for name in COEFFICIENTS}, source="drawn")
    regions = StageRegions(
        **{
            f"{name}_K": np.array([at])
            for name, at in zip(("low", "high", "first", "middle"), (0, units, 1, again.stop), strict=True)
        }
    )
    loads = Loads.of(values, (1, units), np.array([float(waits)]))
    passes = Passes(loads, np.zeros(1, dtype=np.int64), regions, interference, False)

    def seconds(name, unit, *, edge=False):
        if name.startswith("kept"):
            layer = "checkpoint" if unit in again else "saved"
            name = f"{'last_' * (unit == order[-1])}{name.replace('kept', layer)}"
        name = "frozen_in" if edge and name == "parameters_in" else name
        return values[name][0, unit] + values["again"][0, unit] * (name == "backward" and unit in again)

    def together(beside):
        return float(seconds_together(beside[:, None], speed_table(interference, False))[0])

    def priced(kind, **how):
        return pytest.approx(float(passes.seconds(PassKind(kind, copies=True, **how))[0]), rel=1e-12)

    if has:
        assert walked(forward, seconds, together, waits=waits) == priced(ActionKind.FORWARD)
        assert walked(backward, seconds, together, waits=waits) == priced(ActionKind.BACKWARD)
    if update:
        of_first = partial(seconds, edge=True)
        assert walked(first, of_first, together, waits=waits) == priced(ActionKind.FORWARD, edge=True, away=True)
