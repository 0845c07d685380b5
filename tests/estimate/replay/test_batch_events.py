import numpy as np
import pytest

from lightning_mist.estimate.replay.rank_replay import replay_rank
from lightning_mist.plan import row_slice
from tests.cost.events import WIDTH, with_events
from tests.integration.parity import make_plan
from tests.specs import spec


@pytest.fixture(scope="module")
def network():
    return with_events(spec(4))


def moments(replay, action):
    """Before and behind an action of the last step."""
    marks = [*replay.marks, None]
    at = max(index for index, mark in enumerate(replay.marks) if mark.action == action)
    end = len(replay.events_E) if marks[at + 1] is None else marks[at + 1].event
    return replay.alive_at(replay.marks[at].event - 1), replay.alive_at(end - 1)


def named(alive, name):
    return [(item.stage, item.microbatch, item.nbytes) for item in alive if item.label.name == name]


def test_inputs_are_received_ahead_and_gradients_after_them(network):
    replay = replay_rank(network, make_plan([2, 2], parts=4), 1)
    before, behind = moments(replay, "1RECV_F2")
    assert named(behind, "received activation") == [*named(before, "received activation"), (1, 2, WIDTH)]
    before, behind = moments(replay, "1SEND_B2")
    assert (1, 2, WIDTH) in named(before, "received activation")
    assert (1, 2, WIDTH) not in named(behind, "received activation")


def test_an_output_lives_until_its_send_has_arrived(network):
    replay = replay_rank(network, make_plan([2, 2], parts=4), 0)
    outputs = lambda alive: [i.microbatch for i in alive if i.label.part == 1 and i.nbytes == WIDTH]  # noqa: E731
    # The second stage answers microbatch 0 with a gradient, which the backward of microbatch 0 waits for.
    assert 0 in outputs(moments(replay, "0SEND_F0")[1])
    assert 0 in outputs(moments(replay, "0B0")[0])
    assert 0 not in outputs(moments(replay, "0B0")[1])


def test_the_gradient_that_came_is_gone_when_the_backward_has_ended(network):
    replay = replay_rank(network, make_plan([2, 2], parts=4), 0)
    before, behind = moments(replay, "0B1")
    assert (0, 1, WIDTH) in named(before, "received gradient")
    assert (0, 1, WIDTH) not in named(behind, "received gradient")


def test_what_comes_in_portions_is_put_together(network):
    plan = make_plan([2, 2], degrees=[2, 1], parts=2)
    rank = plan.stages[1].devices[0]
    replay = replay_rank(network, plan, rank)
    rows = plan.stages[1].microbatch_size
    assert row_slice(plan, rank, 0).parts == plan.num_microbatches // 3
    behind = moments(replay, "1RECV_F1")[1]
    assert named(behind, "received activation")[-2:] == [(1, 1, WIDTH * rows // 2)] * 2
    behind = moments(replay, "1F1")[1]
    assert (1, 1, WIDTH * rows) in named(behind, "received, put together")
    assert 1 not in {microbatch for _, microbatch, _ in named(behind, "received activation")}


def test_a_unit_is_unsharded_while_it_computes(network):
    plan = make_plan([4], degrees=[2], parts=2, zero=3)
    for rank in range(2):
        replay = replay_rank(network, plan, rank)
        live = [
            item
            for item in replay.alive_at(replay.peak_event)
            if item.label.name == "parameters of other ranks, unsharded"
        ]
        assert sum(item.nbytes for item in live) <= 80_000 + 2 * 40_400
        before, behind = moments(replay, "0F0")
        assert not named(before, "parameters of other ranks, unsharded")
        # The tail stays for the backward that follows, with the layer below it on its way.
        assert sum(size for *_, size in named(behind, "parameters of other ranks, unsharded")) <= 80_000 + 40_400


def test_what_is_sent_is_let_go_of_at_the_end(network):
    replay = replay_rank(network, make_plan([1, 3], parts=4), 1)
    left = np.abs(replay.live_E[-1])
    names = {item.label.name for item in replay.alive_at(len(replay.events_E) - 1)}
    assert left > 0
    assert not names & {"received activation", "received gradient", "temporary", "gradient"}
