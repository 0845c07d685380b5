"""Sweeping over rounds gives the times of running the lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import StageSeconds, StepRules
from lightning_mist.schedule.program import program_of
from lightning_mist.schedule.program_clock import run
from lightning_mist.schedule.seconds import crossing_seconds, slot_seconds
from lightning_mist.schedule.sweep import can_sweep, sweep

# Whole numbers, so that sums are exact in whatever order.
seconds = st.integers(0, 20).map(float)
maybe = st.one_of(st.none(), st.integers(20, 40).map(float))
stages = st.builds(
    lambda forward, rest, weight, first, begins, ends: StageSeconds(
        forward=forward,
        backward=rest + weight,
        weight=weight,
        first_forward=first,
        first_backward=begins,
        last_backward=ends,
    ),
    *[seconds] * 3,
    *[maybe] * 3,
)


def run_lists(each, activations, gradients, microbatches, name):
    """Last times of groups by running the program of the whole schedule."""
    program = program_of(len(each), microbatches, name)
    times = run(program, slot_seconds(each), crossing_seconds(activations, gradients), StepRules())
    arrived = [0.0] * len(each)
    for sender, arrivals in zip(program.senders, times.arrivals, strict=True):
        arrived[sender] = max(arrived[sender], arrivals[-1])
    return times.ends, tuple(arrived)


@given(st.lists(stages, min_size=1, max_size=6), st.integers(0, 12), st.sampled_from(["1f1b", "zb-h1"]), st.data())
def test_a_sweep_takes_as_long_as_the_lists(each, more, name, data):
    crossing = st.lists(seconds, min_size=len(each) - 1, max_size=len(each) - 1)
    activations, gradients = data.draw(crossing), data.draw(crossing)
    microbatches = len(each) + more
    found = sweep(each, activations, gradients, microbatches, name)
    assert (found.ends, found.arrivals) == run_lists(each, activations, gradients, microbatches, name)


def test_two_stages_by_hand():
    each = [StageSeconds(forward=1, backward=2), StageSeconds(forward=3, backward=4)]
    found = sweep(each, [0.5], [0.25], 2, "1f1b")
    # The first stage: F0 to 1, F1 to 2, B0 from 8.75, B1 to 17.75. The second: F0 from 1.5, B0 to 8.5, F1 to 11.5.
    assert found.ends == (17.75, 15.5)
    assert found.arrivals == (5.0, 15.75)


@pytest.mark.parametrize(
    ("shape", "known"),
    [((4, 4, "1f1b"), True), ((4, 3, "1f1b"), False), ((1, 1, "zb-h1"), True), ((2, 8, "gpipe"), False)],
)
def test_what_is_known(shape, known):
    assert can_sweep(*shape) == known
