"""Planning keeps within the memory that the plan is to keep within, or does less at a time.

The user's step runs on real numbers before there is a plan: to prove that batches may be cut, to time layers, to
compare the cut module with the whole. A module that needs a plan to fit may not fit that way.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from lightning_mist.devices import ops_of
from lightning_mist.errors import TraceError
from lightning_mist.strategy.all_ranks import everywhere, of_all_ranks

T = TypeVar("T")

SETS = 2
"""Of parameters and their gradients, that comparing gradients takes: measured, 2.1 times the parameters' bytes beside
what a step keeps."""


_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""What torch's allocator on a CPU says, in a RuntimeError (c10/core/impl/alloc_cpu.cpp)."""

AMPLE = 0.1
"""Share of the memory that may be used, below which parameters and gradients leave room for whatever a step keeps of
the few rows that it is tried on: that is not counted, which takes half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What planning may take of each device.

    Attributes:
        held: Bytes of the parameters, without those that have no values yet.
        limit: Bytes that tensors may take.
        step_bytes: Counts what one step of the whole batch allocates at its peak, gradients included; ``None`` if that
            cannot be told.
    """

    held: int
    limit: float
    step_bytes: Callable[[], int | None]

    def is_crowded(self) -> bool:
        """Whether a comparison of gradients may take more than there is."""
        if SETS * self.held <= AMPLE * self.limit:
            return False
        step = self.step_bytes()
        return SETS * self.held + (self.held if step is None else step) > self.limit

    def fitting(self, sizes: Sequence[int]) -> list[int]:
        """Microbatches that can be timed: those whose step fits beside the parameters, the smallest in any case.

        Args:
            sizes: Rows of each, ascending; the last is the whole batch.
        """
        step = self.step_bytes()
        if step is None:
            return list(sizes)
        return [size for size in sizes if size == sizes[0] or self.held + step * size / sizes[-1] <= self.limit]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it comes from, is that memory has run out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


def unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """What work gives; ``None`` if memory ran out, which is free again then.

    Args:
        work: What to do.
        device: Where it computes.

    Raises:
        Exception: Any other error of the work.
    """
    try:
        return work()
    except (TraceError, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Outside of the handler: the traceback held what the work had made.
    gc.collect()
    ops_of(device).release_cached()
    return None


def everywhere_unless_out_of_memory(work: Callable[[], T], device: torch.device) -> T | None:
    """The same on all ranks at once; ``None`` on all if memory ran out on any, an error on all if there is one.

    Args:
        work: What to do.
        device: Where it computes.

    Raises:
        Exception: This rank's own error, or a :class:`TraceError` with that of another.
    """
    found = everywhere(lambda: unless_out_of_memory(work, device))
    return found if all(of_all_ranks(found is not None)) else None
