"""What all ranks do together before they train: start alike, hear of rank 0's result or error, compare what is seen."""

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap, ParameterUse
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.runtime.parameters import memory_of

T = TypeVar("T")


def _picklable(error: Exception) -> Exception:
    """The error, or, if it cannot travel to other processes, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
        same.__cause__ = error
        return same
    return error


def of_all_ranks(value: T) -> list[T]:
    """What every rank has, by rank; called on all at once."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def on_rank_zero(work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result, or raise its error on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [(True, work())]
        except Exception as error:  # the others wait: whatever it is, they must hear of it
            box = [(False, _picklable(error))]
    dist.broadcast_object_list(box, 0)
    succeeded, value = box[0]
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


def everywhere(work: Callable[[], T]) -> T:
    """Do something on every rank at once; if it fails on any, raise that rank's error on all of them."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as own:  # the others wait: whatever it is, they must hear of it
        error = _picklable(own)
    first = next((item for item in of_all_ranks(error) if item is not None), None)
    if first is not None:
        raise first if error is None else error
    return result[0]


def any_reason(mine: str | None) -> str | None:
    """The first rank's reason that has one; None if none has. Called on all at once."""
    return next((reason for reason in of_all_ranks(mine) if reason), None)


def same_start(module: nn.Module, later: Collection[str]) -> None:
    """Give every rank the values of rank 0, as DDP does when it wraps a module, less parameters that get them later."""
    parameters = [p for name, p in module.named_parameters() if name not in later]
    with torch.no_grad():
        for tensor in [*parameters, *module.buffers()]:
            # NCCL takes what lies together in memory only, which transposed parameters and expanded buffers do not.
            values = memory_of(tensor.detach())
            together = values.contiguous()
            dist.broadcast(together, 0)
            if together is not values:
                values.copy_(together)


def same_everywhere(found: ModuleMap) -> ModuleMap:
    """One map of what the ranks found of their module, each on a batch of its own; called on all at once.

    A parameter is used wherever any rank uses it, and what rules a plan out on one rank does so on all. Sizes stay
    those of each rank's batch.

    Raises:
        PlanError: On every rank, if ranks found different modules.
    """
    cuts = tuple(tuple(replace(live, shape=(len(live.shape),)) for live in cut) for cut in found.cuts)
    mine = replace(found, cuts=cuts, outputs=(), batch_rows=1)
    if len(set(of_all_ranks(blake2b(repr(mine).encode()).digest()))) == 1:
        return found
    every = of_all_ranks(mine)
    modules = [(one.blocks, [_joined((use,), ()) for use in one.parameters]) for one in every]
    different = [rank for rank, module in enumerate(modules) if module != modules[0]]
    if different:
        # An error in the step of one rank shows here first.
        firsts = {rank: next((item.reason for item in every[rank].exclusions), "") for rank in (0, different[0])}
        reasons = "".join(f". On rank {rank}: {reason}" for rank, reason in firsts.items() if reason)
        raise PlanError(
            f"ranks {different} see another module than rank 0 (parameters, or blocks that run, differ): every rank "
            f"must build the same one and call the same blocks; seed what is random in its construction{reasons}"
        )
    exclusions = dict.fromkeys(item for one in every for item in one.exclusions)
    if any(one.cuts != every[0].cuts for one in every):
        why = "other values cross between layers on one rank than on another: first batches take other branches"
        exclusions |= dict.fromkeys(exclusions_of([(why, ("pipeline", "tensor", "context"))]))
    return replace(
        found,
        parameters=tuple(_joined(uses, uses) for uses in zip(*(one.parameters for one in every), strict=True)),
        leaking_blocks=tuple(sorted({position for one in every for position in one.leaking_blocks})),
        exclusions=tuple(exclusions),
        indexes_by_mask=any(one.indexes_by_mask for one in every),
        leaves_out=any(one.leaves_out for one in every),
        writes=max(one.writes for one in every),
    )


def _joined(uses: Sequence[ParameterUse], counted: Sequence[ParameterUse]) -> ParameterUse:
    """A parameter, used in the regions where those that count use it."""
    regions = [{region for use in counted for region in use.slots[slot][2]} for slot in range(len(uses[0].slots))]
    slots = zip(uses[0].slots, regions, strict=True)
    return replace(uses[0], slots=tuple((*slot[:2], tuple(sorted(found))) for slot, found in slots))
