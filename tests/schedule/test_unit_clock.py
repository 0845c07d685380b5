import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.plan import ZeroStage
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.generate import generate
from lightning_mist.schedule.unit_clock import time_units
from lightning_mist.schedule.units import StageUnits, expand


def lines_of(layers, microbatches, *, zero=3):
    order = tuple(range(layers))
    units = StageUnits(order=order, reduced=frozenset(order), zero_stage=ZeroStage(zero))
    (actions,) = generate(1, microbatches)
    return expand(actions, {0: units})


def seconds_of(*, forward=1.0, backward=2.0, unshard=0.0, reduce=0.0):
    table = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: backward,
        ActionKind.UNSHARD: unshard,
        ActionKind.REDUCE_GRADIENTS: reduce,
    }
    return lambda line: table[line.kind]


def test_without_transfers_only_computation_takes_time():
    times = time_units(lines_of(3, 2), seconds_of())
    assert (times.makespan, times.exposed) == (18.0, 0.0)


def test_transfers_shorter_than_a_unit_hide_but_for_the_first_and_the_last():
    times = time_units(lines_of(4, 2), seconds_of(unshard=0.5, reduce=0.75))
    # Two units come before the first computation, of which it waits for one; the last reduction ends behind everything.
    assert times.exposed == pytest.approx(0.5 + 0.75)


def test_transfers_longer_than_a_unit_set_the_pace():
    times = time_units(lines_of(4, 1), seconds_of(forward=1.0, unshard=3.0))
    # Units 0 to 3 one behind the other, forward and backward of unit 3, units 1 and 0 again, the backward of unit 0.
    assert times.makespan == 4 * 3.0 + (1.0 + 2.0) + 2 * 3.0 + 2.0


def test_without_overlap_everything_adds_up():
    lines = lines_of(3, 1)
    flat = [line for part in lines for line in part]
    unshards = sum(line.kind is ActionKind.UNSHARD for line in flat)
    times = time_units(lines, seconds_of(unshard=0.5, reduce=0.25), overlaps=False)
    assert times.exposed == unshards * 0.5 + 3 * 0.25


@given(
    layers=st.integers(1, 5),
    microbatches=st.integers(1, 3),
    zero=st.sampled_from([2, 3]),
    unshard=st.floats(0.0, 5.0),
    reduce=st.floats(0.0, 5.0),
)
def test_overlap_lies_between_the_longer_stream_and_the_sum_of_both(layers, microbatches, zero, unshard, reduce):
    lines, seconds = lines_of(layers, microbatches, zero=zero), seconds_of(unshard=unshard, reduce=reduce)
    times, serial = time_units(lines, seconds), time_units(lines, seconds, overlaps=False)
    computed = layers * microbatches * 3.0
    moved = serial.makespan - computed
    assert max(computed, moved) - 1e-9 <= times.makespan <= serial.makespan + 1e-9
    for span in times.spans:
        assert 0.0 <= span.start <= span.end <= times.makespan
