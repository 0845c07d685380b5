"""Which communicators a rank holds: against what a run of the plan does, and by name."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_mist.estimate.device_need import Communicator, communicators_by_degrees, communicators_of
from lightning_mist.model import derive_splits
from lightning_mist.plan import ModuleMap, Plan, plan_of
from lightning_mist.runtime.parameters.gather import ParameterGatherer
from lightning_mist.runtime.parameters.optimizer_cut import global_grad_norm
from lightning_mist.runtime.process_state import get_random_state
from lightning_mist.strategy.training.batch_exchange import BatchExchange
from tests import zoo
from tests.integration.parity import Rank, make_plan, map_of, microbatches
from tests.memory_transport import InMemoryWorld, drive
from tests.plan.test_mesh import make_map

CPU = torch.device("cpu")
ROWS = 4

PLANS = {
    "data parallel": {"layers": [4], "degrees": [3], "zero": 1},
    "stages": {"layers": [1, 2, 1], "parts": 2},
    "tied over sharded stages": {"layers": [2, 2], "degrees": [2, 2], "zero": [2, 0], "parts": 2},
    "uneven degrees": {"layers": [2, 2], "degrees": [1, 2], "parts": 2},
    "tensor parallel": {"layers": [2, 2], "tensor": [2, 1], "parts": 2},
    "sequence parallel": {"layers": [2, 2], "tensor": 2, "sequence": [True, False], "parts": 2},
    "interleaved": {"layers": [1, 1, 1, 1], "chunks": 2, "parts": 4, "schedule": "interleaved-1f1b"},
}


class Listener:
    """A transport that remembers with whom it exchanged tensors."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.groups: set[tuple[int, ...]] = set()
        self.messages: set[tuple[int, int]] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.transport, name)
        if not callable(value) or name == "all_gather_object":
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            rank = self.transport.rank
            if name == "isend":
                self.messages.add((rank, args[1]))
            elif name == "irecv":
                self.messages.add((args[1], rank))
            else:
                group = kwargs.get("group") or next(arg for arg in reversed(args) if isinstance(arg, (tuple, list)))
                self.groups |= {tuple(group)} if len(group) > 1 else set()
            return value(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def llama() -> tuple[torch.nn.Module, Callable[[int], Any], ModuleMap]:
    module, make_batch = zoo.make("llama_tied")
    batch, call = make_batch(ROWS), zoo.step(module)
    return module, make_batch, derive_splits(module, call, batch, map_of(module, batch), (2,))


def listened(
    module: torch.nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any]
) -> tuple[Listener, ...]:
    """All ranks of a plan exchange batches, compute one step, and clip their gradients."""
    world = InMemoryWorld(plan.world_size)
    listeners = tuple(Listener(transport) for transport in world.transports)

    def run(rank: int, listener: Any) -> Any:
        yield from BatchExchange(plan, rank, listener, CPU).run(batches[rank], get_random_state(CPU))
        one = Rank.make(copy.deepcopy(module), module_map, plan, rank, listener)
        yield from one.run(microbatches(plan, rank, batches))
        every = one.executor.stages.every
        speakers = ParameterGatherer(plan, rank, every, module_map, listener).speakers
        with one.showing():
            yield from global_grad_norm(one.executor.mesh, every, speakers, listener)

    drive([run(rank, listener) for rank, listener in enumerate(listeners)])
    return listeners


@pytest.mark.parametrize("name", PLANS)
def test_a_step_talks_over_just_these(llama: Any, name: str) -> None:
    module, make_batch, module_map = llama
    plan = make_plan(rows=ROWS, **PLANS[name])
    batches = [make_batch(ROWS) for _ in range(plan.world_size)]
    for rank, heard in enumerate(listened(module, module_map, plan, batches)):
        found = communicators_of(plan, module_map, rank)
        pairs = [item.ranks for item in found if item.is_for_messages]
        groups = {item.ranks for item in found[1:] if not item.is_for_messages}
        # One for each direction in which messages go, and no group that nothing needs.
        assert sorted(pairs) == sorted(tuple(sorted(pair)) for pair in heard.messages)
        assert groups == heard.groups


def test_every_group_has_one() -> None:
    plan = make_plan([1, 1], degrees=[2, 2], tensor=2)
    found = communicators_of(plan, make_map(2, tied=(0, 1), degrees=(2,)), 0)
    world = tuple(range(8))
    # Lightning's, the plan's own, that of batches, of data- and of tensor-parallel ranks, and of tied parameters.
    assert found[:6] == (
        *[Communicator(world)] * 2,
        *map(Communicator, [(0, 1, 4, 5), (0, 2), (0, 1), (0, 4)]),
    )
    # The rank of the next stage that holds the same part of what crosses, in both directions.
    assert found[6:] == (Communicator((0, 4), is_for_messages=True),) * 2


def test_one_process_has_none() -> None:
    assert communicators_of(make_plan([1]), make_map(1), 0) == ()


def test_a_plan_that_mixes_batches_is_not_refused() -> None:
    plan = replace(make_plan([1, 1], rows=4), num_microbatches=1, global_batch_size=4)
    found = communicators_of(plan, make_map(2), 0)
    assert [item.is_for_messages for item in found] == [False, False, True, True]


def test_plans_that_are_not_executed_have_those_of_their_degrees():
    plan = plan_of(
        8, world_size=16, global_batch_size=16, pipeline_stages=2, context_parallel_degree=2, tensor_parallel_degree=2
    )
    found = communicators_by_degrees(plan, plan.stages[0].devices[3])
    devices = plan.stages[0].devices
    expected = [devices[1::2], devices[3::4], devices[1:4:2], devices[2:4]]
    assert found[:-2] == tuple(map(Communicator, [tuple(range(16))] * 2 + [tuple(sorted(each)) for each in expected]))
    assert all(item.is_for_messages for item in found[-2:])
