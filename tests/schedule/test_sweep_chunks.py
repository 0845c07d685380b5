"""Sweeping over rounds of chunks gives the times of running the lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import StageSeconds, StepRules
from lightning_mist.schedule.program import program_of
from lightning_mist.schedule.program_clock import run
from lightning_mist.schedule.seconds import crossing_seconds, slot_seconds
from lightning_mist.schedule.sweep_chunks import can_sweep_chunks, sweep_chunks
from tests.schedule.test_sweep import stages

NAME = "interleaved-1f1b"


def run_lists(each, activations, gradients, microbatches, groups):
    """Last times of groups by running the program of the whole schedule."""
    program = program_of(len(each), microbatches, NAME, num_groups=groups)
    times = run(program, slot_seconds(each), crossing_seconds(activations, gradients), StepRules())
    arrived = [0.0] * groups
    for sender, arrivals in zip(program.senders, times.arrivals, strict=True):
        arrived[sender] = max(arrived[sender], arrivals[-1])
    return times.ends, tuple(arrived)


@given(st.integers(3, 5), st.integers(2, 4), st.integers(2, 4), st.integers(0, 60), st.data())
def test_a_sweep_takes_as_long_as_the_lists(groups, chunks, rounds, slowest, data):
    count, microbatches = groups * chunks, groups * rounds
    each = data.draw(st.lists(stages, min_size=count, max_size=count))
    # Moving takes from nothing to several times as long as computing.
    crossing = st.lists(st.integers(0, slowest).map(float), min_size=count - 1, max_size=count - 1)
    activations, gradients = data.draw(crossing), data.draw(crossing)
    found = sweep_chunks(each, activations, gradients, microbatches, groups)
    assert (found.ends, found.arrivals) == run_lists(each, activations, gradients, microbatches, groups)


def test_equal_chunks_have_the_bubble_of_one_chunk_for_each_other_group():
    groups, chunks, microbatches = 4, 3, 8
    each = [StageSeconds(forward=1.0, backward=2.0)] * (groups * chunks)
    none = [0.0] * (groups * chunks - 1)
    found = sweep_chunks(each, none, none, microbatches, groups)
    assert max(found.ends) == (microbatches * chunks + groups - 1) * 3.0


@pytest.mark.parametrize(("shape", "known"), [((3, 6), True), ((3, 3), False), ((3, 7), False), ((2, 8), False)])
def test_what_is_known(shape, known):
    assert can_sweep_chunks(*shape) == known
