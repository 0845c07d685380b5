import dataclasses
from itertools import pairwise

import pytest
import torch

from lightning_mist.estimate.replay.rank_replay import replay_rank
from lightning_mist.model import describe_optimizer
from lightning_mist.runtime.recording import StorageMeter
from tests.cost.events import with_events
from tests.integration.parity import make_plan
from tests.specs import spec


def temporaries(replay):
    """The most bytes of the optimizer's temporaries at any moment of its step."""
    at = max(index for index, mark in enumerate(replay.marks) if mark.action.endswith("STEP"))
    ends = [mark.event for mark in replay.marks[at + 1 :]] or [len(replay.events_E)]
    start = replay.marks[at].event
    return int((replay.live_E[start : ends[0]] - replay.live_E[start - 1]).max(initial=0))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"amsgrad": True}, {"fused": True}])
def test_an_optimizer_needs_what_it_is_seen_to_need(options):
    network = spec(4)
    real = [torch.nn.Parameter(torch.ones(item.numel)) for item in network.parameters]
    optimizer = torch.optim.AdamW(real, **options)
    meter = StorageMeter()
    for _ in range(2):
        for parameter in real:
            parameter.grad = torch.ones_like(parameter)
        meter.observe(real)
        meter.observe([parameter.grad for parameter in real])
        meter.observe([value for state in optimizer.state.values() for value in state.values()])
        meter.reset()
        before = meter.current_bytes
        with meter:
            optimizer.step()
    network = dataclasses.replace(with_events(network), optimizer=describe_optimizer(optimizer))
    found = temporaries(replay_rank(network, make_plan([4], parts=2), 0))
    assert 0 <= meter.peak_bytes - before - found <= 8 * len(real)


def test_a_loop_keeps_what_one_parameter_left_until_the_next_is_done():
    network = with_events(spec(4))
    loop = dataclasses.replace(
        network.optimizer, step_peak_bytes_per_largest=3.0, step_left_bytes_per_parameter_byte=1.0
    )
    network = dataclasses.replace(network, optimizer=loop)
    sizes = [item.bytes for item in network.parameters]
    expected = max(2 * sizes[0], *(before + 2 * size for before, size in pairwise(sizes)))
    assert temporaries(replay_rank(network, make_plan([4], parts=2), 0)) == expected


def test_state_is_made_by_the_first_step():
    network = with_events(spec(4))
    replay = replay_rank(network, make_plan([4], parts=2), 0)
    first = min(mark.event for mark in replay.marks if mark.action == "0STEP")
    assert not [item for item in replay.alive_at(first - 1) if item.label.term == "optimizer_bytes"]
    state = [item for item in replay.alive_at(replay.begin) if item.label.term == "optimizer_bytes"]
    assert sum(item.nbytes for item in state) == 2 * sum(item.bytes for item in network.parameters)
