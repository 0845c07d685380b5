"""Tensor-parallel ranks as threads of one process, for checks at planning time and for tests.

Exactly one thread runs at a time; the turn goes on where a rank waits for the others' part of a collective. Every rank
draws from a random stream of its own that starts alike. Modes that torch keeps per thread (gradients, autocast) start
as they are where :func:`run_ranks` is called.
"""

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_mist.errors import ScheduleError
from lightning_mist.tensor_parallel.group import Reduction, TensorGroup

T = TypeVar("T")


class _Ended(BaseException):
    """Leaves a rank because another one failed."""


class _Table:
    """Where ranks put their parts of the collective at hand, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size, self.turn = size, 0
        self.condition = threading.Condition()
        self.error: BaseException | None = None
        self.done = [False] * size
        self.rounds: list[dict[int, tuple[Any, Tensor]]] = []
        self.states = [torch.get_rng_state() for _ in range(size)]

    def await_turn(self, rank: int) -> None:
        """Block until it is this rank's turn."""
        with self.condition:
            while self.turn != rank and self.error is None:
                self.condition.wait()
            if self.error is not None:
                raise _Ended
        torch.set_rng_state(self.states[rank])

    def pass_turn(self, rank: int) -> None:
        """Give the turn to the next rank that is not done."""
        self.states[rank] = torch.get_rng_state()
        with self.condition:
            for step in range(1, self.size + 1):
                self.turn = (rank + step) % self.size
                if not self.done[self.turn]:
                    break
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """End all ranks."""
        with self.condition:
            self.error = self.error or error
            self.condition.notify_all()


class _ThreadGroup:
    """A group among threads."""

    def __init__(self, table: _Table, rank: int) -> None:
        self.rank, self.size, self._table, self._round = rank, table.size, table, 0

    def all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Tensor:
        stacked = self._exchange(("all_reduce", reduction), tensor)
        return stacked.sum(0) if reduction == "sum" else stacked.amax(0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._exchange(("all_gather",), tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self._exchange(("reduce_scatter",), tensor)[:, self.rank].sum(0)

    def _exchange(self, kind: tuple[str, ...], tensor: Tensor) -> Tensor:
        """The tensors of all ranks in the next collective."""
        table, number = self._table, self._round
        self._round += 1
        if number == len(table.rounds):
            table.rounds.append({})
        parts = table.rounds[number]
        label = (*kind, tuple(tensor.shape), tensor.dtype)
        for other, (theirs, _) in parts.items():
            if theirs != label:
                raise ScheduleError(f"rank {self.rank} calls {label}, rank {other} {theirs}: all must call the same")
        parts[self.rank] = (label, tensor.detach().clone())
        while len(parts) < self.size:
            if all(done for rank, done in enumerate(table.done) if rank not in parts):
                missing = sorted(set(range(self.size)) - parts.keys())
                raise ScheduleError(f"rank {self.rank} waits in {label} for ranks {missing}, which have ended")
            table.pass_turn(self.rank)
            table.await_turn(self.rank)
        return torch.stack([parts[rank][1] for rank in range(self.size)])


def run_ranks(size: int, function: Callable[[TensorGroup], T]) -> list[T]:
    """Run a function as every rank of a group, in turn.

    Args:
        size: Number of ranks.
        function: Called once per rank with the group as that rank sees it.

    Returns:
        What each rank returned.

    Raises:
        ScheduleError: If ranks call different collectives, or one waits for a rank that has ended.
        BaseException: The first error of any rank; the others end.
    """
    table, results = _Table(size), [None] * size
    modes = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    def live(rank: int) -> None:
        try:
            table.await_turn(rank)
            with torch.set_grad_enabled(modes[0]), torch.autocast("cpu", enabled=modes[1], dtype=modes[2]):
                results[rank] = function(_ThreadGroup(table, rank))  # type: ignore[call-overload]
            table.done[rank] = True
            table.pass_turn(rank)
        except _Ended:
            pass
        except BaseException as error:
            table.fail(error)

    threads = [threading.Thread(target=copy_context().run, args=(live, rank), daemon=True) for rank in range(size)]
    started_from = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_rng_state(table.states[0] if table.error is None else started_from)
    if table.error is not None:
        raise table.error
    return _as_results(results)


def _as_results(results: Sequence[Any]) -> list[Any]:
    return list(results)
