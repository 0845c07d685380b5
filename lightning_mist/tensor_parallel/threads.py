"""Ranks as threads of one process, for checks and tests: one runs at a time, and all have a generator of their own.

So with torch's default floating-point type, which belongs to the process: a step that sets it for its duration (as
Lightning's true half and double precision do) is interrupted by other ranks' steps.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from lightning_mist.errors import PlanError
from lightning_mist.tensor_parallel.collectives import Reduction

Result = TypeVar("Result")


class _AbandonedError(BaseException):
    """Ends a rank because another one failed."""


class _Ranks:
    """Whose turn it is, and the collective that ranks have arrived at."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.condition = threading.Condition()
        self.states = [torch.get_rng_state() for _ in range(size)]
        self.dtypes = [torch.get_default_dtype()] * size
        self.arrived: dict[int, tuple[tuple[object, ...], Tensor]] = {}
        self.results: dict[int, Tensor] = {}
        self.finished: set[int] = set()
        self.error: BaseException | None = None

    def await_turn(self, rank: int) -> None:
        """Block until this rank may run. The condition must be held."""
        while self.turn != rank and self.error is None:
            self.condition.wait()
        if self.error is not None:
            raise _AbandonedError
        torch.set_rng_state(self.states[rank])
        torch.set_default_dtype(self.dtypes[rank])

    def pass_on(self, rank: int) -> None:
        """Let the next rank run that can. The condition must be held."""
        self.states[rank], self.dtypes[rank] = torch.get_rng_state(), torch.get_default_dtype()
        waiting = set(self.arrived) - set(self.results)
        able = [(rank + step) % self.size for step in range(1, self.size + 1)]
        able = [other for other in able if other not in self.finished and other not in waiting]
        if able:
            self.turn = able[0]
        elif waiting:
            named = ", ".join(f"rank {other} waits in {self.arrived[other][0]}" for other in sorted(waiting))
            self.error = PlanError(
                f"ranks {sorted(self.finished)} returned and {named}: all ranks must make the same collectives"
            )
        self.condition.notify_all()

    def _failed(self, what: str) -> PlanError:
        """Wake all ranks with an error. The condition must be held."""
        error = self.error = PlanError(what)
        self.condition.notify_all()
        return error

    def exchange(self, rank: int, kind: tuple[object, ...], tensor: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        """Wait for the tensors of all ranks; this rank's result of them."""
        with self.condition:
            if rank != self.turn:
                # Ranks share what a module keeps between calls; they must not compute with each other's tensors.
                raise self._failed(f"rank {self.turn} computes with a tensor that belongs to rank {rank}")
            self.arrived[rank] = (kind, tensor)
            kinds = {other: value[0] for other, value in self.arrived.items()}
            if len(set(kinds.values())) > 1:
                raise self._failed(f"ranks are in different collectives: {kinds}")
            if len(self.arrived) == self.size:
                tensors = [self.arrived[other][1] for other in range(self.size)]
                self.results = {other: combine(tensors, other) for other in range(self.size)}
                self.arrived = {}
            self.pass_on(rank)
            self.await_turn(rank)
            return self.results.pop(rank)


class ThreadGroup:
    """One rank's view of ranks that are threads. See :class:`lightning_mist.tensor_parallel.collectives.TensorGroup`.

    Attributes:
        resume: Is called on the rank's thread when it runs again behind a collective, for others have run meanwhile.
        callers: For which torch functions the ranks communicated, and how often, where ``resume`` counts that.
        largest_gather: The most numbers that the ranks put together at once.
    """

    def __init__(self, ranks: _Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size
        self.adds_later, self.largest_gather, self.callers = False, 0, Counter[str]()
        self.resume: Callable[[], None] = lambda: None

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The sum or maximum over the ranks, a new tensor."""

        def combine(tensors: list[Tensor], rank: int) -> Tensor:
            stacked = torch.stack([part.detach() for part in tensors])
            return stacked.sum(0, dtype=stacked.dtype) if reduction == "sum" else stacked.amax(0)

        return self._exchange(f"all_reduce ({reduction})", tensor, combine)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked along a new first dimension."""
        self.largest_gather = max(self.largest_gather, self.size * tensor.numel())
        return self._exchange("all_gather", tensor, lambda tensors, rank: torch.stack([t.detach() for t in tensors]))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of this rank's entry."""

        def combine(tensors: list[Tensor], rank: int) -> Tensor:
            return torch.stack([part.detach()[rank] for part in tensors]).sum(0)

        return self._exchange("reduce_scatter", tensor, combine)

    def _exchange(self, name: str, tensor: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        if tensor.device.type != "cpu":
            raise PlanError(
                f"{name} of a tensor on {tensor.device}: ranks that are threads compute on the CPU only, since torch "
                "runs all backwards of another device in one thread. Move module and batch to the CPU"
            )
        kind = (name, tuple(tensor.shape), tensor.dtype)
        result = self._ranks.exchange(self.rank, kind, tensor, combine)
        self.resume()
        return result


def run_ranks(size: int, function: Callable[[ThreadGroup], Result]) -> list[Result]:
    """Call a function for every rank, each in its own thread, and return the results in order.

    Exactly one rank runs at any time; it changes at collectives. Every rank begins with the state that torch's default
    generator has now and goes on from there for itself; the caller's generator is left as it was. The same goes for the
    default floating-point type. Whether gradients are enabled is the caller's.

    Raises:
        PlanError: If the ranks make different collectives.
    """
    ranks, results = _Ranks(size), dict[int, Result]()
    state, dtype, has_grad = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with ranks.condition:
                ranks.await_turn(rank)
            with torch.set_grad_enabled(has_grad):
                results[rank] = function(ThreadGroup(ranks, rank))
            with ranks.condition:
                ranks.finished.add(rank)
                ranks.pass_on(rank)
        except _AbandonedError:
            return
        except BaseException as error:  # raised again in the calling thread
            with ranks.condition:
                ranks.error = ranks.error or error
                ranks.condition.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)
    if ranks.error is not None:
        raise ranks.error
    return [results[rank] for rank in range(size)]
