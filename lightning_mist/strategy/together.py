"""What all ranks do together while they plan: hear of rank 0's result or error, and see that they see the same."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

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
