"""How the user's module can be split over tensor-parallel ranks: found on rank 0, told to all."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_mist.model import derive_splits
from lightning_mist.plan import Exclusion, ModuleMap, Plan, TensorSplit
from lightning_mist.strategy.all_ranks import on_rank_zero
from lightning_mist.strategy.progress import Progress

_Told = tuple[
    tuple[TensorSplit, ...],
    tuple[tuple[int, str], ...],
    tuple[Exclusion, ...],
    tuple[tuple[int | None, ...], ...],
]
"""Splits, degrees that were tried in vain, exclusions, and the sequence dimension of every tensor at every cut."""


def degrees_of(plan: Plan) -> tuple[int, ...]:
    """The tensor-parallel degrees above 1 that a plan uses."""
    degrees = {stage.mesh.tensor_parallel_degree for stage in plan.stages}
    return tuple(sorted(degrees - {1}))


def with_splits(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    found: ModuleMap,
    degrees: Sequence[int],
    progress: Progress,
    tried: Callable[[Callable[[], _Told]], _Told],
) -> ModuleMap:
    """The map with what rank 0 found out about splitting; the same on every rank, called on all at once.

    Args:
        module: The user's module.
        call: Runs its step on a batch.
        batch: This rank's batch.
        found: Its map.
        degrees: Tensor-parallel degrees to try; without any nothing is done.
        progress: Where to say what takes time.
        tried: Runs work on the user's code without leaving a trace.
    """
    if not degrees or found.excludes("tensor"):
        return found
    progress.say(f"finding out how {', '.join(map(str, degrees))} devices could share layers")

    def derive() -> _Told:
        made = derive_splits(module, call, batch, found, degrees)
        more = made.exclusions[len(found.exclusions) :]
        dims = tuple(tuple(live.sequence_dim for live in cut) for cut in made.cuts)
        return made.splits, made.unsplit, more, dims

    splits, unsplit, more, dims = on_rank_zero(lambda: tried(derive))
    # Everything else stays as this rank saw it: its batch may have other sizes than that of rank 0.
    cuts = tuple(
        tuple(replace(live, sequence_dim=dim) for live, dim in zip(cut, of_cut, strict=True))
        for cut, of_cut in zip(found.cuts, dims, strict=True)
    )
    return replace(found, splits=splits, unsplit=unsplit, exclusions=(*found.exclusions, *more), cuts=cuts)
