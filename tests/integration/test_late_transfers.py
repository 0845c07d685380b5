"""Results do not depend on when transfers arrive: nobody reads what it has not waited for, or changes what travels."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mist.runtime.communication.transport import Transport, Work
from tests.integration.parity import Rank, microbatches, precision_of
from tests.integration.test_parity import plan_for, prepared
from tests.memory_transport import InMemoryWorld, drive

SEEDS = 3


class _Late:
    """A transfer whose result is there when somebody waits for it, or at some moment before."""

    def __init__(self, work: Work, tensor: Tensor, travelling: Tensor, *, changes: bool) -> None:
        self._work, self._tensor, self._travelling, self._changes = work, tensor, travelling, changes
        self._sent = None if changes else tensor.clone()
        self._is_there = False

    def arrive(self) -> None:
        if self._is_there or not self._work.is_completed():
            return
        self._is_there = True
        if self._changes:
            self._tensor.data.copy_(self._travelling)
        else:
            assert self._sent is not None
            assert torch.equal(self._tensor, self._sent), "a tensor was changed on its way"

    def is_completed(self) -> bool:
        if self._work.is_completed():
            self.arrive()
        return self._is_there

    def wait(self) -> None:
        self._work.wait()
        self.arrive()


class LateTransport:
    """Delivers at random times; what has not arrived is not a number."""

    def __init__(self, transport: Transport, seed: int) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport, self._random = transport, random.Random(seed)
        self._under_way: list[_Late] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> Work:
        changes = self.rank != source
        return self._start("broadcast", tensor, source, group, changes=changes, hides=changes)

    def reduce(self, tensor: Tensor, destination: int, group: Any) -> Work:
        return self._start("reduce", tensor, destination, group, changes=True, hides=True)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        return self._start("irecv", tensor, source, tag, changes=True, hides=True)

    def isend(self, tensor: Tensor, destination: int, tag: int) -> Work:
        return self._start("isend", tensor, destination, tag, changes=False, hides=False)

    def _start(self, name: str, tensor: Tensor, *args: Any, changes: bool, hides: bool) -> Work:
        for late in self._under_way:
            if self._random.random() < 0.3:
                late.arrive()
        travelling = tensor.detach().clone()
        late = _Late(getattr(self._transport, name)(travelling, *args), tensor, travelling, changes=changes)
        if hides and tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        self._under_way.append(late)
        return late


def _gradients(options: dict[str, Any], seed: int | None) -> list[dict[str, Tensor]]:
    module, module_map, batches = prepared("nano", torch.float64)
    plan = plan_for(len(module_map.blocks), **options)
    world = InMemoryWorld(plan.world_size)
    with precision_of(module):
        ranks = [
            Rank.make(
                copy.deepcopy(module),
                module_map,
                plan,
                index,
                transport if seed is None else LateTransport(transport, seed * 100 + index),
            )
            for index, transport in enumerate(world.transports)
        ]
        for _ in range(2):
            for rank in ranks:
                rank.module.zero_grad()
            drive([rank.run(microbatches(plan, i, batches[: plan.world_size])) for i, rank in enumerate(ranks)])
    return [rank.gradients() for rank in ranks]


@pytest.mark.sample
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "degrees": [2], "zero": 3, "parts": 2, "checkpointed": 1},
        {"stages": 2, "degrees": [2, 2], "zero": [3, 2], "parts": 2},
        {"stages": 2, "degrees": [1, 2], "zero": 1},
        {"stages": 4, "chunks": 2, "degrees": [1, 2], "parts": 2, "checkpointed": 1},
        {"stages": 2, "degrees": [1, 2], "schedule": "zb-h1", "parts": 2, "zero": [0, 1]},
    ],
)
def test_any_time_of_arrival_gives_the_same_bits(options):
    expected = _gradients(options, None)
    for seed in range(SEEDS):
        for mine, wanted in zip(_gradients(options, seed), expected, strict=True):
            assert mine.keys() == wanted.keys()
            for name, gradient in mine.items():
                assert torch.equal(gradient, wanted[name]), name
