"""Peak bytes of every rank of a plan, measured while all of them run in this process."""

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_mist.plan import ModuleMap, Plan, row_slice
from lightning_mist.runtime.communication.transport import Transport, Work
from lightning_mist.runtime.executor import Microbatch
from lightning_mist.runtime.offload.optimizer_state import offload_optimizer_state
from lightning_mist.runtime.parameters.optimizer_cut import restrict_optimizer
from lightning_mist.runtime.recording import StorageMeter
from lightning_mist.runtime.stage.pipeline_stage import no_caches
from lightning_mist.tensors import batch_rows
from tests.integration.parity import Rank, loss_of, microbatches
from tests.memory_transport import InMemoryWorld, drive

STEPS = 2
"""The first step makes the optimizer's state; the second one is measured, or the third where state is moved: through
rooms that the second makes."""


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of one rank: the peak of its device, and host memory for what is moved there."""

    device: int
    host: int


def measure_peaks(
    module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any], *, master_weights: bool = False
) -> list[int]:
    """Largest peak of any rank, for every stage of a plan."""
    return [use.device for use in measure(module, module_map, plan, batches, master_weights=master_weights)]


def measure(
    module: nn.Module, module_map: ModuleMap, plan: Plan, batches: Sequence[Any], *, master_weights: bool = False
) -> list[Use]:
    """The most of each that any rank uses, for every stage of a plan."""
    world = InMemoryWorld(plan.world_size)
    runs = [
        _train(copy.deepcopy(module), module_map, plan, batches, Elsewhere(item), master_weights=master_weights)
        for item in world.transports
    ]
    uses = drive(runs)
    return [
        Use(max(uses[rank].device for rank in stage.devices), max(uses[rank].host for rank in stage.devices))
        for stage in plan.stages
    ]


def measure_plain_peak(module: nn.Module, module_map: ModuleMap, plan: Plan, batch: Any) -> int:
    """Peak of a rank where torch's ``DistributedDataParallel`` does by itself what the plan says.

    It is given peers that only exist by number: whatever is reduced stays as it is.
    """
    module, meter = copy.deepcopy(module), StorageMeter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        meter.observe([*module.parameters(), *module.buffers(), *tree_leaves(batch)])
        with no_caches(module, module_map), meter:
            step = nn.parallel.DistributedDataParallel(_Step(module), gradient_as_bucket_view=True)
            step.register_comm_hook(None, _as_it_is)
            optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
            for _ in range(STEPS):
                optimizer.zero_grad()
                meter.reset()
                loss_of(step(batch)).backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    return meter.peak_bytes


def _as_it_is(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Step(nn.Module):
    """A module's training step as its forward, as Lightning has it run."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


class _Send:
    """A send that keeps its tensor until it is let go, as a process group's does; in memory it lets go on arrival."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self.work, self.tensor = work, tensor

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()


class _Piece(_Send):
    """A sum of which a rank gets its piece, in memory of its own."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        super().__init__(work, tensor)
        self.piece = torch.empty_like(tensor[0])

    def result(self) -> torch.Tensor:
        with _disable_current_modes():
            return self.piece.copy_(self.work.result())


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
            kept = {"isend": _Send, "reduce_scatter": _Piece}
            return kept[name](result, args[0]) if name in kept else result

        return call


def _train(
    module: nn.Module,
    module_map: ModuleMap,
    plan: Plan,
    batches: Sequence[Any],
    transport: Transport,
    *,
    master_weights: bool = False,
) -> Generator[Work, None, Use]:
    masters = None
    if master_weights:
        masters = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
        module = module.to(torch.bfloat16)
    rank = Rank.make(module, module_map, plan, transport.rank, transport, masters)
    masters = None  # the rank has what it keeps
    stages = rank.executor.stages
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    pieces = {stages.parameters[name]: part for name, part in rank.every_part().items()}
    restrict_optimizer(optimizer, rank.executor.updated, pieces)
    streams, pool = rank.executor.streams, rank.executor.pool
    moved = offload_optimizer_state(
        *(optimizer, rank.executor.mesh, module_map, stages.parameters, streams, pool, rank.executor.shards),
        *(rank.executor.gradients, rank.executor.transport, rank.executor.masters, rank.executor.even),
    )
    if moved is not None:
        rank.executor.take_update(moved)
    stages.free_foreign()
    parts = microbatches(plan, transport.rank, batches)
    meter = StorageMeter()
    for _ in range(STEPS + (moved is not None)):
        optimizer.zero_grad()
        meter.reset()
        meter.observe(_held(rank, optimizer, plan, batches, transport.rank))
        yield from _metered(meter, _step(rank, optimizer, parts, by_units=moved is not None))
    if moved is not None:
        moved.end()
    return Use(meter.peak_bytes, pool.nbytes)


def _step(
    rank: Rank, optimizer: torch.optim.Optimizer, parts: Sequence[Microbatch], *, by_units: bool
) -> Iterator[Work]:
    yield from rank.run(parts)
    if rank.executor.gradients is not None:
        rank.executor.gradients.install(torch.ones(()))
    with rank.showing() if not by_units else nullcontext():
        if by_units:
            rank.executor.even.install(torch.ones(()))
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
    if rank.executor.masters is not None:
        yield from rank.executor.masters.given_out(is_cast=True).values()
        yield from () if rank.executor.shards is None else rank.executor.shards.flats
    yield from rank.module.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    owners = {index} | {row_slice(plan, index, count).owner for count in range(plan.num_microbatches)}
    for owner in owners:
        assert batch_rows(batches[owner])
        yield from (leaf for leaf in tree_leaves(batches[owner]) if isinstance(leaf, torch.Tensor))
