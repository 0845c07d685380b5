"""What all ranks do together before they train: start alike, hear of rank 0's result or error, compare what is seen."""

import pickle
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.plan import ModuleMap

T = TypeVar("T")


def _travelling(error: Exception) -> Exception:
    """The error, or, if it cannot travel to other processes, one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
        same.__cause__ = error
        return same
    return error


def on_rank_zero(work: Callable[[], T]) -> T:
    """Do something on rank 0 and give every rank its result, or raise its error on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [(True, work())]
        except Exception as error:  # the others wait: whatever it is, they must hear of it
            box = [(False, _travelling(error))]
    dist.broadcast_object_list(box, 0)
    succeeded, value = box[0]
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


def same_start(module: nn.Module, later: Collection[str]) -> None:
    """Give every rank the values of rank 0, as DDP does when it wraps a module.

    Args:
        module: The module.
        later: Names of parameters that get their values later.
    """
    parameters = [p for name, p in module.named_parameters() if name not in later]
    with torch.no_grad():
        for tensor in [*parameters, *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def same_everywhere(found: ModuleMap) -> None:
    """Raise on every rank if ranks found different modules."""
    digests: list[Any] = [None] * dist.get_world_size()
    mine = (found.blocks, [use.name for use in found.parameters], [tuple(t.key for t in cut) for cut in found.cuts])
    dist.all_gather_object(digests, repr(mine))
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise PlanError(
            f"ranks {different} see another module than rank 0 (blocks, parameters or values between them differ): "
            "every rank must build the same module and take the same branches; seed what is random in its construction"
        )
