"""Peak bytes of every rank of a plan, measured while all of them run in this process."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_mist.plan import ModuleMap, Plan, row_slice
from lightning_mist.runtime.batches import batch_rows
from lightning_mist.runtime.executor import Microbatch
from lightning_mist.runtime.memory_transport import InMemoryWorld, drive
from lightning_mist.runtime.meter import StorageMeter
from lightning_mist.runtime.optimizer import restrict_optimizer
from lightning_mist.runtime.transport import Transport, Work
from tests.integration.parity import Rank, microbatches

STEPS = 2
"""The first step makes the optimizer's state; the second one is measured."""

Meter = TypeVar("Meter", bound=StorageMeter)


def measure_peaks(module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any]) -> list[int]:
    """Largest peak of any rank, for every stage of a plan."""
    peaks = [meter.peak_bytes for meter in run_metered(module, module_map, plan, batches, StorageMeter)]
    return [max(peaks[rank] for rank in stage.devices) for stage in plan.stages]


def take_inventories(
    module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any]
) -> list["InventoryMeter"]:
    """What each rank's peak consists of, for those who look for a difference; slow."""
    return run_metered(module, module_map, plan, batches, InventoryMeter)


def run_metered(
    module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any], make_meter: Callable[[], Meter]
) -> list[Meter]:
    """The meters of all ranks after the steps."""
    world = InMemoryWorld(plan.world_size)
    return drive(
        [
            _train(copy.deepcopy(module), module_map, plan, batches, Elsewhere(item), make_meter())
            for item in world.transports
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A storage that was alive at a peak.

    Attributes:
        bytes: Its size.
        made: The operator that was seen with it first, in which part of a computation, and the line that called it.
    """

    bytes: int
    made: str


class InventoryMeter(StorageMeter):
    """A meter that remembers what was alive at its peak, and who made it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, str] = {}
        self._operator = "observed"
        self.at_peak: tuple[Item, ...] = ()
        self.peak_operator = ""

    def reset(self) -> None:
        super().reset()
        self._take_stock()

    def observe(self, tensors: Any) -> None:
        before = self.peak_bytes
        self._operator = "observed"
        super().observe(tensors)
        if self.peak_bytes > before:
            self._take_stock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.peak_bytes
        self._operator = f"{func} at {_caller()}"
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak_bytes > before:
            self._take_stock()
        return result

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known is None or known() is None:
            self._made[storage._cdata] = self._operator
        super()._count_storage(storage)

    def _take_stock(self) -> None:
        self.peak_operator = self._operator
        self.at_peak = tuple(
            Item(bytes=item.size, made=self._made.get(address, "?"))
            for address, item in self._alive.items()
            if item() is not None
        )

    def by_maker(self) -> list[tuple[int, int, str]]:
        """Bytes, number and maker of what was alive at the peak, the most bytes first."""
        sizes, counts = Counter[str](), Counter[str]()
        for item in self.at_peak:
            sizes[item.made] += item.bytes
            counts[item.made] += 1
        return [(size, counts[made], made) for made, size in sizes.most_common()]


def _caller() -> str:
    """The innermost lines outside of torch and of this file."""
    frame: Any = sys._getframe(2)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__ and not name.startswith("<"):
            lines.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class _Send:
    """A send that keeps its tensor until it is let go, as a process group's does; in memory it lets go on arrival."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self.work, self.tensor = work, tensor

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.work.wait()


class Elsewhere:
    """A transport whose copies and sums no meter sees: in this process they touch tensors of several ranks at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._transport, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                result = value(*args, **kwargs)
            return _Send(result, args[0]) if name == "isend" else result

        return call


def _train(
    module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any], transport: Transport, meter: Meter
) -> Generator[Work, None, Meter]:
    rank = Rank.make(module, module_map, plan, transport.rank, transport)
    stages = rank.executor.stages
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    restrict_optimizer(optimizer, [stages.parameters[item.name] for item in rank.executor.mesh.owned])
    stages.hollow()
    parts = microbatches(plan, transport.rank, batches)
    for _ in range(STEPS):
        optimizer.zero_grad()
        meter.reset()
        meter.observe(_held(rank, optimizer, plan, batches, transport.rank))
        yield from _metered(meter, _step(rank, optimizer, parts))
    return meter


def _step(rank: Rank, optimizer: torch.optim.Optimizer, parts: Sequence[Microbatch]) -> Iterator[Work]:
    yield from rank.run(parts)
    optimizer.step()
    yield from rank.executor.gather_parameters()


def _metered(meter: StorageMeter, run: Iterator[Work]) -> Iterator[Work]:
    """What a rank does counts as its own, also when the ranks take turns."""
    while True:
        with meter:
            try:
                work = next(run)
            except StopIteration:
                return
        yield work
        del work


def _held(
    rank: Rank, optimizer: torch.optim.Optimizer, plan: Plan, batches: Sequence[Any], index: int
) -> Iterator[torch.Tensor]:
    """What a rank has between steps, its own batch and those it computes on."""
    yield from rank.executor.parameters.values()
    yield from rank.module.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    owners = {index} | {row_slice(plan, index, count).owner for count in range(plan.num_microbatches)}
    for owner in owners:
        assert batch_rows(batches[owner])
        yield from (leaf for leaf in tree_leaves(batches[owner]) if isinstance(leaf, torch.Tensor))
