"""What plans post runs to its end under NCCL's rules, and the orders that do not are found."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from lightning_mist.plan import Plan, row_slice
from lightning_mist.plan.mesh import message_pairs
from lightning_mist.runtime.parameters.optimizer_cut import global_grad_norm
from lightning_mist.runtime.process_state import get_random_state
from lightning_mist.strategy.training.batch_exchange import BatchExchange
from tests.integration import test_parity_tensor as tensor
from tests.integration.nccl_rules import Call, Recording, by_direction, by_pair, replay
from tests.integration.parity import Rank
from tests.integration.test_parity import PLANS, plan_for, prepared
from tests.memory_transport import InMemoryWorld, drive

# Torch hides this one itself when a fake meets a tensor of the stage, but cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

CPU = torch.device("cpu")
SIDES = {
    "eager": {},
    "lazy": {"is_eager": False},
    "buffered": {"is_buffered": True},
}
"""How communicators come about, and whether messages are small."""


def gathering(recording: Recording, exchange: BatchExchange, batch: Any) -> Iterator[Any]:
    """The exchange of batches; what it says first is in host memory on any device."""
    run = exchange.run(batch, get_random_state(CPU))
    recording.on_host = True
    first = next(run, None)
    recording.on_host = False
    if first is not None:
        yield first
        yield from run


def sending(recording: Recording, exchange: BatchExchange, batch: Any) -> Iterator[Any]:
    """The exchange as it was once: everybody sends to all peers first, and receives then."""
    plan, rank = exchange.plan, recording.rank
    wanted = {
        peer: {row_slice(plan, peer, index).owner for index in range(plan.num_microbatches)} - {peer}
        for peer in exchange.owners
    }
    sends = [recording.isend(torch.zeros(4), peer, 1 << 20) for peer in exchange.owners if rank in wanted[peer]]
    for owner in sorted(wanted[rank]):
        yield recording.irecv(torch.zeros(4), owner, 1 << 20)
    yield from sends
    yield from gathering(recording, exchange, batch)


def recorded(plan: Plan, module: Any, module_map: Any, batches: Any, exchange: Any = gathering) -> list[Recording]:
    """Two batches and a norm of all gradients, as the ranks of a plan post them."""
    recordings = [Recording(transport) for transport in InMemoryWorld(plan.world_size).transports]

    def run(rank: int) -> Iterator[Any]:
        recording = recordings[rank]
        one = Rank.make(copy.deepcopy(module), module_map, plan, rank, recording)
        batch_exchange = BatchExchange(plan, rank, recording, CPU)
        for _ in range(2):
            for parameter in one.executor.parameters.values():
                parameter.grad = None
            yield from exchange(recording, batch_exchange, batches[rank])
            yield from one.run(batch_exchange.microbatches)
        mesh, every = one.executor.mesh, one.executor.stages.every
        with one.showing():
            yield from global_grad_norm(mesh, every, speakers_of(plan, rank, every, module_map, recording), recording)
        yield from one.executor.gather_parameters()

    drive([recordings[rank].watch(run(rank)) for rank in range(plan.world_size)])
    return recordings


def speakers_of(plan: Plan, rank: int, every: Any, module_map: Any, transport: Any) -> Any:
    from lightning_mist.runtime.parameters.gather import ParameterGatherer

    return ParameterGatherer(plan, rank, every, module_map, transport).speakers


@cache
def pipeline(label: str, exchange: Any = gathering) -> tuple[Plan, list[Recording]]:
    module, module_map, batches = prepared("nano", torch.float64)
    plan = plan_for(len(module_map.blocks), **PLANS[label])
    return plan, recorded(plan, module, module_map, batches, exchange)


@pytest.mark.sample
@pytest.mark.parametrize("label", PLANS)
def test_plans_run_to_their_end(label):
    plan, recordings = pipeline(label)
    for side in SIDES.values():
        assert replay(recordings, **side) == []
    messages = [call for one in recordings for call in one.record if isinstance(call, Call) and call.is_message]
    assert {call.members for call in messages} <= set(message_pairs(plan))


@pytest.mark.thorough
@pytest.mark.parametrize("label", tensor.PLANS)
def test_plans_that_share_layers_run_to_their_end(label):
    module, module_map, batches = tensor.split("nano")
    plan = plan_for(len(module_map.blocks), **tensor.PLANS[label])
    recordings = recorded(plan, module, module_map, batches)
    for side in SIDES.values():
        assert replay(recordings, **side) == []
    messages = [call for one in recordings for call in one.record if isinstance(call, Call) and call.is_message]
    assert {call.members for call in messages} <= set(message_pairs(plan))


def test_batches_that_are_sent_before_any_is_received_wait_for_connections_for_ever():
    _, recordings = pipeline("two stages", sending)
    stuck = replay(recordings, by_direction, is_connected=False)
    assert stuck == [
        "rank 0: its host posts message 1048576 among [0, 1]",
        "rank 1: its host posts message 1048576 among [1, 0]",
    ]


def test_large_batches_that_share_a_communicator_wait_for_each_other_for_ever():
    _, recordings = pipeline("four stages", sending)
    assert replay(recordings, by_direction)
    assert replay(recordings, by_direction, is_buffered=True) == []
    assert replay(recordings, by_pair) == []


def test_stages_that_connect_at_their_first_message_wait_for_ever_under_gpipe():
    _, recordings = pipeline("four stages, gpipe")
    assert replay(recordings, by_pair, is_connected=False)
    assert replay(recordings, by_pair) == []


def test_calls_that_meet_others_than_their_own_are_told():
    recordings = [Recording(transport) for transport in InMemoryWorld(2).transports]
    values = [torch.zeros(2) for _ in range(4)]
    for tag in (1, 2):
        recordings[0].isend(values[tag - 1], 1, tag)
        recordings[1].irecv(values[tag + 1], 0, 3 - tag)
    first, second = replay(recordings)
    assert first == "rank 0: message 1 among [0, 1] meets rank 1: message 2 among [0, 1]"
    assert second == "rank 0: message 2 among [0, 1] meets rank 1: message 1 among [0, 1]"
