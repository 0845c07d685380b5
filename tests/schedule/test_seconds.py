from itertools import compress, product

import pytest

from lightning_mist.plan import Plan, StageMesh, StagePlan
from lightning_mist.schedule import ActionKind, ActionSeconds, generate
from lightning_mist.schedule.lowering import KINDS, are_again, slot_of
from lightning_mist.schedule.seconds import crossing_seconds, plan_seconds, slot_seconds

STAGE = ActionSeconds(
    forward=3, backward=10, weight=4, first_forward=5, first_backward=8, forward_again=20, backward_again=70
)


def of(stage, kind, *, is_first=False, is_again=False):
    return stage.of(kind, is_first=is_first, is_again=is_again)


def test_the_first_microbatch_and_passes_that_follow_their_like():
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    assert [of(STAGE, forward), of(STAGE, forward, is_first=True), of(STAGE, forward, is_again=True)] == [3, 5, 23]
    assert [of(STAGE, backward), of(STAGE, backward, is_first=True), of(STAGE, backward, is_again=True)] == [10, 8, 80]
    # A batch begins with no unit there anyway; its first backward may follow another stage's.
    assert [of(STAGE, kind, is_first=True, is_again=True) for kind in (forward, backward)] == [5, 78]


@pytest.mark.parametrize(
    ("schedule", "again"),
    [
        ("1f1b", {"0F1", "0B3"}),
        ("gpipe", {*(f"{stage}{kind}{index}" for stage in (0, 1) for kind in "FB" for index in (1, 2, 3))}),
        ("zb-h1", {"0F1", "0I3"}),
    ],
)
def test_passes_follow_their_like_where_the_parameter_windows_say_so(schedule, again):
    actions = generate(2, 4, schedule)
    found = set()
    for line in actions:
        found |= {str(item) for item in compress(line, are_again((item.stage, item.kind) for item in line))}
    assert found == again


@pytest.mark.parametrize(("first", "wanted"), [(8, (6, 2)), (10, (6, 4)), (5, (5, 0)), (13, (6, 7))])
def test_what_the_first_backward_saves_is_saved_in_the_gradients_of_weights(first, wanted):
    stage = ActionSeconds(forward=3, backward=10, weight=4, first_backward=first)
    halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    assert tuple(of(stage, kind, is_first=True) for kind in halves) == wanted
    assert tuple(of(stage, kind) for kind in halves) == (6, 4)


def test_slots_are_numbered_as_in_programs():
    slots = slot_seconds([ActionSeconds(forward=1, backward=1), STAGE])
    for kind in KINDS:
        for is_first, is_again in product((False, True), repeat=2):
            place = {"is_first": is_first, "is_again": is_again}
            assert slots[slot_of(1, kind, **place)] == of(STAGE, kind, **place)


def test_crossings_come_in_pairs():
    assert crossing_seconds([1, 2], [3, 4]) == [1, 3, 2, 4]


def make_plan(schedule="1f1b", groups=2, chunks=1):
    stages = tuple(
        StagePlan(layers=(index, index + 1), mesh=StageMesh(devices=(index % groups,)), microbatch_size=1)
        for index in range(groups * chunks)
    )
    return Plan(global_batch_size=4, num_microbatches=4, stages=stages, schedule=schedule)


def test_terms_become_actions():
    term = {
        "forward_seconds": 1.0,
        "backward_seconds": 20.0,
        "recompute_seconds": 300.0,
        "weight_seconds": 7.0,
        "forward_unshard_seconds": 1000.0,
        "backward_unshard_seconds": 1250.0,
        "begin_seconds": 16.0,
        "forward_again_seconds": 64.0,
        "backward_again_seconds": 128.0,
        "scatter_seconds": 30_000.0,
        "ring_seconds": 500_000.0,
        "forward_ring_seconds": 200_000.0,
        "copies_seconds": 6e6,
        "forward_copies_seconds": 2e6,
        "overhead_seconds": 8e7,
        "forward_overhead_seconds": 3e7,
        "accumulate_seconds": 5.0,
        "arrival_seconds": 0.25,
        "return_seconds": 0.5,
        "send_seconds": 0.75,
        "send_back_seconds": 0.875,
        "reduce_seconds": 1.5,
        "tied_seconds": 2.5,
        "update_seconds": 3.5,
        "update_copies_seconds": 0.125,
        "once_seconds": 4.0,
        "gather_seconds": 5.5,
        "deferred_seconds": 0.5,
    }
    found = plan_seconds(make_plan(), [term, term])
    stage = found.stages[1]
    assert stage.forward == 1 + 1000 + 200_000 + 2e6 + 3e7
    assert stage.first_forward == stage.forward + 16.5
    assert (stage.forward_again, stage.backward_again) == (64, 128)
    assert stage.backward == 20 + 300 + 1250 + 30_000 + 300_000 + 4e6 + 5e7
    assert stage.first_backward == stage.backward - 5
    assert stage.weight == 7
    assert (stage.reduce, stage.reduce_tied, stage.step, stage.gather) == (1.5, 2.5, 7.125, 5.5)
    assert (found.activations, found.gradients) == ((0.25,), (0.5,))
    assert (found.sent_activations, found.sent_gradients) == ((0.75,), (0.875,))
    assert (found.crossings, found.sent_crossings) == ([0.25, 0.5], [0.75, 0.875])
    # First of what the update takes, then of giving out; corrections may have made both less.
    for deferred, step, gather in ((4.625, 4, 4.5), (20, 4, 0)):
        (once, _) = plan_seconds(make_plan(), [term | {"deferred_seconds": deferred}] * 2).stages
        assert (once.step, once.gather) == (step, gather)
    still = found.without_transfers()
    assert still.stages == found.stages
    assert still.crossings == still.sent_crossings == [0.0, 0.0]


def test_chunks_do_once_per_batch_what_all_of_them_need_in_one_loop():
    terms = [{"update_seconds": float(index), "once_seconds": 10.0, "tied_seconds": 1.0} for index in range(4)]
    stages = plan_seconds(make_plan("interleaved-1f1b", chunks=2), terms).stages
    assert [stage.step for stage in stages] == [12, 14, 12, 14]
    assert [stage.reduce_tied for stage in stages] == [2] * 4
