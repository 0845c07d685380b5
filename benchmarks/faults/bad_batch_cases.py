"""What a loader may give a planned run that is odd or wrong: batches of another form than the first, or of none."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.small_fits import PLANS, ROWS, STEPS, WIDTH, Batches, good_batch

Batch = dict[str, Any]
Change = Callable[[Batch], Any]


def _rows(count: int) -> Change:
    def change(batch: Batch) -> Batch:
        return {name: value.repeat(2, *[1] * (value.ndim - 1))[:count] for name, value in batch.items()}

    return change


def _each(change: Callable[[Tensor], Any]) -> Change:
    return lambda batch: {name: change(value) for name, value in batch.items()}


def _entry(name: str, value: Any) -> Change:
    return lambda batch: {**batch, name: value(batch[name]) if callable(value) else value}


class Odd(dict[str, Any]):
    """A mapping of a class of its own."""


def _with_hook(value: Tensor) -> Tensor:
    result = value.clone().requires_grad_()
    result.register_hook(lambda gradient: gradient)
    return result


def _filled(number: float, *, only: str | None = None) -> Change:
    def change(batch: Batch) -> Batch:
        return {
            name: torch.full_like(value, number) if only in (None, name) else value for name, value in batch.items()
        }

    return change


def _one_nan(batch: Batch) -> Batch:
    x = batch["x"].clone()
    x[-1, 0] = float("nan")
    return {**batch, "x": x}


def _inferred(value: Tensor) -> Tensor:
    with torch.inference_mode():
        return value.clone()


CHANGES: Mapping[str, Change] = {
    **{f"{count} rows": _rows(count) for count in (1, 2, 3, 5, 6, 7, 8)},
    "no rows": _rows(0),
    "None": lambda batch: None,
    "a text": lambda batch: "batch",
    "a number": lambda batch: 3,
    "an empty mapping": lambda batch: {},
    "an empty list": lambda batch: [],
    "a list of the tensors": lambda batch: list(batch.values()),
    "a tuple of the tensors": lambda batch: tuple(batch.values()),
    "one tensor": lambda batch: batch["x"],
    "a key more": lambda batch: {**batch, "z": batch["y"]},
    "a key more, of other rows": lambda batch: {**batch, "z": torch.ones(ROWS + 3)},
    "a key more, None": lambda batch: {**batch, "z": None},
    "a key more, a text": lambda batch: {**batch, "z": "text"},
    "a key more, texts": lambda batch: {**batch, "z": ["a"] * ROWS},
    "a key more, a function": lambda batch: {**batch, "z": lambda: None},
    "a key more, a generator": lambda batch: {**batch, "z": (item for item in ())},
    "a key more, an object": lambda batch: {**batch, "z": object()},
    "a key more, nested": lambda batch: {**batch, "z": {"a": [batch["x"], {"b": batch["y"]}]}},
    "keys in another order": lambda batch: dict(reversed(batch.items())),
    "a key less": lambda batch: {"x": batch["x"]},
    "another key": lambda batch: {"x": batch["x"], "target": batch["y"]},
    "a mapping of another class": Odd,
    "float32": _each(lambda value: value.float()),
    "float16": _each(lambda value: value.half()),
    "integers": _each(lambda value: value.long()),
    "truths": _each(lambda value: value > 0),
    "complex": _each(lambda value: value.to(torch.complex128)),
    "labels of float32": _entry("y", lambda value: value.float()),
    "wider rows": _entry("x", torch.ones(ROWS, WIDTH + 1, dtype=torch.float64)),
    "narrower rows": _entry("x", torch.ones(ROWS, 1, dtype=torch.float64)),
    "sequences of rows": _entry("x", lambda value: value.unsqueeze(1).repeat(1, 3, 1)),
    "rows without a batch": _entry("x", lambda value: value[0]),
    "a label for all": _entry("y", torch.tensor(0.5, dtype=torch.float64)),
    "zero-dimensional": _each(lambda value: value.sum()),
    "a label too few": _entry("y", lambda value: value[:-1]),
    "a label too many": _entry("y", torch.ones(ROWS + 1, dtype=torch.float64)),
    "labels as a list": _entry("y", lambda value: value.tolist()),
    "labels as numpy's": _entry("y", lambda value: value.numpy()),
    "labels None": _entry("y", None),
    "labels a text": _entry("y", "labels"),
    "one NaN": _one_nan,
    "all NaN": _filled(float("nan")),
    "infinite": _filled(float("inf"), only="x"),
    "huge": _filled(1e300, only="x"),
    "labels NaN": _filled(float("nan"), only="y"),
    "zeros": _filled(0.0),
    "transposed memory": _entry("x", lambda value: value.t().contiguous().t()),
    "every second row": _entry("x", lambda value: value.repeat_interleave(2, 0)[::2]),
    "expanded": _entry("x", lambda value: value[:1].expand(ROWS, WIDTH)),
    "with gradients": _entry("x", lambda value: value.clone().requires_grad_()),
    "with a hook": _entry("x", _with_hook),
    "with a graph": _entry("x", lambda value: value.clone().requires_grad_() * 1.0),
    "without values": _entry("x", lambda value: value.to("meta")),
    "sparse": _entry("x", lambda value: value.to_sparse()),
    "a view of one memory": lambda batch: {"x": batch["x"], "y": batch["x"][:, 0]},
    "the same object twice": lambda batch: {**batch, "z": batch["x"]},
    "an inference tensor": _entry("x", _inferred),
}
"""What is done to one batch."""


WHERE = ("first", "later", "last", "all")
WHO = ("all ranks", "rank 1")


def _batches(change: Change, where: str, who: str) -> Batches:
    places = {"first": (0,), "later": (2,), "last": (STEPS - 1,), "all": range(STEPS)}[where]

    def of_rank(rank: int) -> Iterator[Any]:
        for number in range(STEPS):
            batch = good_batch(rank, number)
            yield change(batch) if number in places and (who == "all ranks" or rank == 1) else batch

    return Batches(of_rank)


def _counts(counts: tuple[int, int]) -> Batches:
    return Batches(lambda rank: (good_batch(rank, number) for number in range(counts[rank])))


def _failing(where: int, who: str) -> Batches:
    def of_rank(rank: int) -> Iterator[Any]:
        for number in range(STEPS):
            if number == where and (who == "all ranks" or rank == 1):
                raise OSError("the disk is gone")
            yield good_batch(rank, number)

    return Batches(of_rank)


def loaders() -> Iterator[tuple[str, str, Batches]]:
    """What is wrong (its family and its name), and what a loader gives then on every rank."""
    for name, change in CHANGES.items():
        for where in WHERE:
            for who in WHO:
                yield f"{where} batch, {who}", f"{name}, {where}, {who}", _batches(change, where, who)
    for counts in ((1, 1), (0, 0), (4, 3), (3, 4), (4, 0), (0, 4), (1, 4), (5, 2)):
        yield "numbers of batches", f"{counts} batches", _counts(counts)
    for who in WHO:
        for where in (0, 1, STEPS - 1):
            yield "loaders that fail", f"fails at {where}, {who}", _failing(where, who)


def batch_runs(chance: random.Random, count: int) -> Iterator[tuple[str, str, Batches, str]]:
    """So many of them, each under a plan: family, name, batches, and the plan's name."""
    every = list(loaders())
    for family, name, batches in chance.sample(every, min(count, len(every))):
        yield family, name, batches, chance.choice(list(PLANS))
