"""Counted moments, and peaks over them, against a plain loop over the whole list in bytes."""

from types import SimpleNamespace

import numpy as np
import pytest

from lightning_mist.cost.memory import StageNeeds
from lightning_mist.cost.memory.moments import COUNTED, device_moments, in_flight, moments_in_order
from lightning_mist.cost.memory.stage_bytes import PeakParts
from lightning_mist.schedule import ActionKind, arrived_sends, generate
from lightning_mist.schedule.action import COMPUTATIONS
from lightning_mist.schedule.lowering import add_transfers
from tests.schedule.in_flight import held_counts

ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))
SCHEDULES = ["1f1b", "gpipe", "zb-h1"]
CHUNKS = [(2, 1, 3), (4, 2, 2), (4, 2, 8), (6, 2, 4), (6, 3, 12), (6, 2, 12), (8, 4, 4), (8, 4, 20)]


def lists_of(stages, microbatches, schedule, groups=None):
    lists = add_transfers(generate(stages, microbatches, schedule, num_groups=groups))
    return list(zip(lists, arrived_sends(lists), strict=True))


def counts_of(moment):
    return dict(zip(COUNTED, moment.counts, strict=True))


def most_along(actions, arrivals, needs):
    """The most bytes over a list: every action changes what is there, and has a peak of its own above it."""
    there = most = 0.0
    received, made = set(), []
    for action in actions:
        of, kind, key = needs[action.stage], action.kind, (action.stage, action.microbatch)
        brought = {
            ActionKind.RECV_ACTIVATION: of.entering,
            ActionKind.RECV_GRADIENT: of.leaving,
            ActionKind.SEND_ACTIVATION: of.handed,
            ActionKind.SEND_GRADIENT: of.returned,
        }
        there += brought.get(kind, 0.0)
        received |= {(kind, *key)}
        if kind not in COMPUTATIONS:
            continue
        under_way = max((needs[stage].pending for stage in made), default=0.0)
        if action in arrivals:
            most = max(most, there + under_way)
        for send in arrivals.get(action, ()):
            sent = needs[send.stage]
            there -= sent.handed if send.kind is ActionKind.SEND_ACTIVATION else sent.returned
        has_made = action.stage in made
        if kind is ActionKind.FORWARD:
            most = max(most, there + of.forward + under_way)
            there += of.saved
        elif kind is ActionKind.BACKWARD_WEIGHT:
            there -= of.waiting
            there += 0.0 if has_made else of.gradients
            most = max(most, there + of.weight_backward + under_way)
        else:
            there -= of.saved + of.leaving * ((ActionKind.RECV_GRADIENT, *key) in received)
            if kind is ActionKind.BACKWARD_INPUT:
                most = max(most, there + of.input_backward + (under_way if has_made else of.together))
                there += of.waiting
            elif has_made:
                most = max(most, there + of.backward + of.reused + under_way - of.pending)
            else:
                most = max(most, there + of.first_backward + under_way)
                there += of.gradients
            there -= of.entering * ((ActionKind.RECV_ACTIVATION, *key) in received)
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) and not has_made:
            made.append(action.stage)
    return most


def assert_peaks_are_those_of_the_list(stages, microbatches, schedule, groups=None):
    random = np.random.default_rng(stages * 100 + microbatches)
    lists = lists_of(stages, microbatches, schedule, groups)
    for group, (actions, arrivals) in enumerate(lists):
        needs = {}
        for stage in range(group, stages, len(lists)):
            arrays = {name: random.integers(0, random.choice([2, 1000]), 5).astype(float) for name in ARRAYS}
            needs[stage] = StageNeeds(always={}, update=(), **arrays)
        moments = device_moments(group, stages, microbatches, schedule, groups)
        found_K = PeakParts.of_chunks(list(needs.values()), {}, ()).peaks(moments)
        for index, found in enumerate(found_K):
            own = {
                stage: SimpleNamespace(**{name.removesuffix("_K"): getattr(item, name)[index] for name in ARRAYS})
                for stage, item in needs.items()
            }
            assert found == most_along(actions, arrivals, own)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9, 16, 40])
def test_peaks_are_those_of_going_through_the_whole_list(stages, microbatches, schedule):
    assert_peaks_are_those_of_the_list(stages, microbatches, schedule)


@pytest.mark.parametrize(("stages", "groups", "microbatches"), CHUNKS)
def test_devices_that_run_several_stages_have_all_of_them_at_once(stages, groups, microbatches):
    assert_peaks_are_those_of_the_list(stages, microbatches, "interleaved-1f1b", groups)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 20])
def test_moments_are_those_of_the_whole_schedule_that_no_other_exceeds(stages, microbatches, schedule):
    for group, (actions, arrivals) in enumerate(lists_of(stages, microbatches, schedule)):
        found = []
        for action, waiting, computing in moments_in_order(actions, arrivals):
            found += [waiting, computing] if action in arrivals else [computing]
        found = list(dict.fromkeys(found))
        counts = np.array([moment.counts for moment in found])
        are_exceeded = (counts[:, None] <= counts).all(axis=2).sum(axis=1) > 1
        most = tuple(moment for moment, is_exceeded in zip(found, are_exceeded, strict=True) if not is_exceeded)
        assert device_moments(group, stages, microbatches, schedule) == most


@pytest.mark.parametrize(("stages", "groups", "microbatches"), CHUNKS)
def test_in_flight_is_that_of_the_whole_schedule(stages, groups, microbatches):
    shapes = [(schedule, stages, None) for schedule in SCHEDULES] + [("interleaved-1f1b", stages, groups)]
    for schedule, count, shared in shapes:
        for group, (actions, _) in enumerate(lists_of(count, microbatches, schedule, shared)):
            moments = device_moments(group, count, microbatches, schedule, shared)
            for chunk, stage in enumerate(range(group, count, shared or count)):
                assert in_flight(moments, chunk) == max(dict(held.open)[stage] for held in held_counts(actions))


def test_accumulation_meets_gradients():
    assert [moment.kind for moment in device_moments(0, 1, 1)] == ["forward", "first backward"]
    found = {moment.kind: counts_of(moment)["gradients"] for moment in device_moments(0, 1, 4)}
    assert found == {"forward": 1, "first backward": 0, "backward": 1}


def test_what_is_received_and_sent_counts():
    first, last = ([counts_of(moment) for moment in device_moments(index, 2, 8)] for index in (0, 1))
    assert not any(counts["entering"] or counts["returned"] for counts in first)
    assert not any(counts["leaving"] for counts in last)
    # While the last stage computes backward, the next activation is on its way, and the gradient before is being sent.
    backward = next(counts for counts in last if counts["backward"])
    assert (backward["entering"], backward["returned"]) == (2, 1)


def test_outputs_that_are_being_sent_are_counted_until_they_have_arrived():
    # The last stage of GPipe sends no output; the first has all on their way until the first gradient comes back.
    first, last = ([counts_of(moment) for moment in device_moments(index, 2, 4, "gpipe")] for index in (0, 1))
    assert max(counts["handed"] for counts in first if counts["forward"]) == 3
    # While it waits for that, it has all four and no computation's temporaries.
    (waits,) = [moment for moment in device_moments(0, 2, 4, "gpipe") if moment.kind == "transfer"]
    assert (counts_of(waits)["saved"], counts_of(waits)["handed"], counts_of(waits)["gradients"]) == (4, 4, 0)
    assert all(counts["handed"] == 0 for counts in first if counts["backward"] or counts["first_backward"])
    assert all(counts["handed"] == 0 for counts in last)


def test_an_input_backward_that_makes_gradients_is_a_moment_of_its_own():
    # Under ZeRO-2 all that it makes may be more than the part that stays, which is what later ones find.
    inputs = [counts_of(moment) for moment in device_moments(0, 2, 8, "zb-h1") if moment.kind == "input backward"]
    assert {(counts["gradients"], counts["together"]) for counts in inputs} == {(0, 1), (1, 0)}
