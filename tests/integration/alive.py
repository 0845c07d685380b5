"""What is alive when a rank of a plan is at its peak, with what made it: the meter, asked which tensors they are."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.runtime.recording.meter import StorageMeter
from tests.integration import metered
from tests.memory_transport import InMemoryWorld, drive


@dataclass(frozen=True, slots=True)
class Tensor:
    """A storage: its bytes, the operator that made it, the action during which it did, and the line that ran it."""

    nbytes: int
    operator: str
    action: str
    line: str


class NamingMeter(StorageMeter):
    """A meter that knows what made each storage."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}
        self._operator = "before"
        self.at_peak: tuple[Tensor, ...] = ()
        self.action = ""
        self.by_action: dict[str, int] = {}
        self._best = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operator = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is None or known() is None or known.size != storage.nbytes():
            action, line = _where()
            self._made[storage._cdata] = Tensor(storage.nbytes(), self._operator, action, line)
        super()._count_storage(storage)
        now = _where()[0]
        self.by_action[now] = max(self.by_action.get(now, 0), self._current)
        if self._current > self._best:
            self._best = self._current
            self._keys = tuple(self._alive)
            self.at_peak = tuple(self._made[key] for key in self._alive)
            self.action = _where()[0]

    def reset(self) -> None:
        super().reset()
        self._best = self._current
        self.by_action.clear()


def _where() -> tuple[str, str]:
    """The action that runs, and the innermost line outside of torch and of this file."""
    action, line, frame = "", "", sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not line and "/torch/" not in code.co_filename and not code.co_filename.endswith(("alive.py", "meter.py")):
            line = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if code.co_name == "perform" and code.co_filename.endswith("pipeline.py"):
            action = str(frame.f_locals["action"])
            break
        frame = frame.f_back
    return action, line


def alive_at_peaks(module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any]) -> list[NamingMeter]:
    """For every rank of a plan the meter that has run with it, which knows what was alive at the peak."""
    meters: list[NamingMeter] = []

    def make() -> NamingMeter:
        meters.append(NamingMeter())
        return meters[-1]

    world = InMemoryWorld(plan.world_size)
    with mock.patch.object(metered, "StorageMeter", make):
        runs = [
            metered._train(metered.copy.deepcopy(module), module_map, plan, batches, metered.Elsewhere(item))
            for item in world.transports
        ]
        drive(runs)
    return meters


def surplus(mine: Sequence[int], theirs: Sequence[int]) -> Counter[int]:
    """Sizes that occur more often in one list than in the other, with how much more often."""
    found = Counter(mine)
    found.subtract(theirs)
    return +found
