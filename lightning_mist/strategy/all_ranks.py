"""What all ranks do together before they train: start alike, hear of rank 0's result or error, compare what is seen."""

import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap
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


def union(mine: Sequence[T]) -> tuple[T, ...]:
    """What any rank has, in the order of ranks, each once."""
    return tuple(dict.fromkeys(item for items in of_all_ranks(tuple(mine)) for item in items))


def same_everywhere(found: ModuleMap) -> None:
    """Raise on every rank if ranks found different modules."""
    mine = (found.blocks, [use.name for use in found.parameters], [tuple(t.key for t in cut) for cut in found.cuts])
    seen = of_all_ranks((repr(mine), next((exclusion.reason for exclusion in found.exclusions), None)))
    different = [rank for rank, (digest, _) in enumerate(seen) if digest != seen[0][0]]
    if different:
        # An error in the step of one rank shows here first.
        reasons = "".join(f". On rank {rank}: {seen[rank][1]}" for rank in (0, different[0]) if seen[rank][1])
        raise PlanError(
            f"ranks {different} see another module than rank 0 (blocks, parameters or values between them differ): "
            "every rank must build the same module and take the same branches; seed what is random in its construction"
            f"{reasons}"
        )
