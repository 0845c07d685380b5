"""Steps that keep state beside the module: counted by DDP once for every batch of a rank's own."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from tests.traps.project import Project, Trap

HELD = {"count": 0}
NUMBERS = itertools.count()
ARRAY = np.zeros(2)
DRAWS = random.Random(3)
MORE_DRAWS = np.random.default_rng(3)
TORCH_DRAWS = torch.Generator().manual_seed(3)
QUEUE: list[float] = []
SPACE = SimpleNamespace(count=0)
COUNT = 0


class Weighted(Project):
    """Scales every loss by a number that comes from elsewhere."""

    def weight(self, batch: Any) -> float:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * (1.0 + 0.1 * self.weight(batch))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class OnAttribute(Weighted):
    count = 0

    def weight(self, batch: Any) -> float:
        self.count += 1
        return self.count % 5


class OnClass(Weighted):
    count = 0

    def weight(self, batch: Any) -> float:
        OnClass.count += 1
        return OnClass.count % 5


class Helper:
    made = 0

    def next(self) -> int:
        type(self).made += 1
        return type(self).made % 5


class OnOtherClass(Weighted):
    def weight(self, batch: Any) -> float:
        return Helper().next()


class OnGlobal(Weighted):
    def weight(self, batch: Any) -> float:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return COUNT % 5


class OnDictionary(Weighted):
    def weight(self, batch: Any) -> float:
        HELD["count"] += 1
        return HELD["count"] % 5


class OnIterator(Weighted):
    def weight(self, batch: Any) -> float:
        return next(NUMBERS) % 5


def numbers() -> Iterator[int]:
    while True:
        yield from (0, 1, 2, 3, 4)


class OnGenerator(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = numbers()

    def weight(self, batch: Any) -> float:
        return next(self.numbers)


class OnCycle(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([0, 1, 2])

    def weight(self, batch: Any) -> float:
        return next(self.numbers)


class OnListIterator(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter([number % 5 for number in range(1000)])

    def weight(self, batch: Any) -> float:
        return next(self.numbers)


class OnArray(Weighted):
    def weight(self, batch: Any) -> float:
        ARRAY[0] += 1
        return float(ARRAY[0] % 5)


class OnOwnArray(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(3)

    def weight(self, batch: Any) -> float:
        self.array += 1
        return float(self.array[0] % 5)


class OnTrainer(Weighted):
    def weight(self, batch: Any) -> float:
        self.trainer.my_count = getattr(self.trainer, "my_count", 0) + 1
        return self.trainer.my_count % 5


class OnCallback(Weighted):
    def weight(self, batch: Any) -> float:
        callback = next(item for item in self.trainer.callbacks if isinstance(item, Counter))
        callback.count += 1
        return callback.count % 5


class Counter(pl.Callback):
    def __init__(self) -> None:
        self.count = 0


class OnRandom(Weighted):
    def weight(self, batch: Any) -> float:
        return DRAWS.random()


class OnNumpyDraws(Weighted):
    def weight(self, batch: Any) -> float:
        return float(MORE_DRAWS.random())


class OnTorchDraws(Weighted):
    def weight(self, batch: Any) -> float:
        return float(torch.rand((), generator=TORCH_DRAWS))


class OnQueue(Weighted):
    def weight(self, batch: Any) -> float:
        QUEUE.append(float(batch["x"].sum()))
        return len(QUEUE) % 5


class OnSpace(Weighted):
    def weight(self, batch: Any) -> float:
        SPACE.count += 1
        return SPACE.count % 5


class OnClosure(Weighted):
    def __init__(self) -> None:
        super().__init__()
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count % 5

        self.counted = counted

    def weight(self, batch: Any) -> float:
        return self.counted()


class OnFunction(Weighted):
    def weight(self, batch: Any) -> float:
        return counted()


def counted() -> int:
    counted.count = getattr(counted, "count", 0) + 1  # type: ignore[attr-defined]
    return counted.count % 5  # type: ignore[attr-defined]


class OnDefault(Weighted):
    def weight(self, batch: Any, held: list[int] = [0]) -> float:  # noqa: B006
        held[0] += 1
        return held[0] % 5


class CountingBlock(nn.Module):
    """A block that counts, on its class, how often it ran."""

    runs = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        CountingBlock.runs += 1
        return self.inner(hidden) * (1.0 + 0.01 * (CountingBlock.runs % 7))


class LateCountingBlock(nn.Module):
    """A block that begins to count how often it ran."""

    def __init__(self, inner: nn.Module, owner: list[Any]) -> None:
        super().__init__()
        self.inner, self.runs, self.owner = inner, 0, owner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.owner[0].global_step >= 2:
            self.runs += 1
        return self.inner(hidden) * (1.0 + 0.01 * (self.runs % 7))


class LateInBlock(Project):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LateCountingBlock(block, [self]) for block in self.blocks])


class InBlock(Project):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CountingBlock(block) for block in self.blocks])


class MoreRows(Weighted):
    """Decides a branch by how often it ran."""

    def weight(self, batch: Any) -> float:
        HELD["count"] += 1
        return float(self.pair(self.hidden(batch).mean(1)).mean()) if HELD["count"] % 3 == 0 else 0.0


class Late(Weighted):
    """Begins to count after some steps."""

    def weight(self, batch: Any) -> float:
        if self.global_step > 3:
            HELD["count"] += 1
        return HELD["count"] % 5


class LateAttribute(Weighted):
    count = 0

    def weight(self, batch: Any) -> float:
        if self.global_step > 3:
            self.count += 1
        return self.count % 5


class LateClass(Weighted):
    count = 0

    def weight(self, batch: Any) -> float:
        if self.global_step > 3:
            LateClass.count += 1
        return LateClass.count % 5


class Remembered(Weighted):
    """Remembers the last hidden state for the next step."""

    last: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.hidden(batch)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())
        if self.last is not None:
            loss = loss + 0.1 * (hidden.mean() - self.last).pow(2)
        self.last = hidden.detach().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Harmless(Project):
    """Reads the step, the epoch and the batch's number, and fills a cache once: nothing to be afraid of."""

    table: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.table is None:
            self.table = torch.arange(10, dtype=torch.float64)
        loss = self.loss(batch) * (1 + 0.01 * self.global_step + 0.1 * self.current_epoch + 0.01 * (batch_idx % 2))
        loss = loss * (1 + 0.001 * self.table[3])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Sparse(Project):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.sparse = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


EVERY = ("auto", "zero1", "zero3", "cut", "pp2", "tp2")
SOME = ("auto", "zero3", "pp2")
BESIDE = ("auto", "zero1", "zero3")
LATE = ("zero3", "cut", "pp2")

TRAPS = {
    "on attribute": Trap(module=OnAttribute, plans=("zero3", "pp2"), equal=("zero3",), reason="count"),
    "on class": Trap(module=OnClass, plans=EVERY, equal=BESIDE, reason="count"),
    "on other class": Trap(module=OnOtherClass, plans=("zero3",), equal=BESIDE),
    "on global": Trap(module=OnGlobal, plans=("pp2",), reason="COUNT"),
    "on dictionary": Trap(module=OnDictionary, plans=("tp2",), reason="HELD"),
    "on iterator": Trap(module=OnIterator, plans=SOME, equal=BESIDE, reason="NUMBERS"),
    "on generator": Trap(module=OnGenerator, plans=SOME, equal=BESIDE, reason="numbers"),
    "on cycle": Trap(module=OnCycle, plans=("zero3",), equal=BESIDE),
    "on list iterator": Trap(module=OnListIterator, plans=("zero3",), equal=BESIDE),
    "on array": Trap(module=OnArray, plans=("zero3", "pp2"), equal=BESIDE, reason="ARRAY"),
    "on own array": Trap(module=OnOwnArray, plans=("zero3", "cut"), equal=BESIDE, reason="array"),
    "on trainer": Trap(module=OnTrainer, plans=SOME, equal=BESIDE, reason="my_count"),
    "on callback": Trap(module=OnCallback, plans=("zero3", "pp2"), callbacks=lambda: [Counter()], reason="count"),
    "on random": Trap(module=OnRandom, plans=("zero3", "pp2"), equal=BESIDE, reason="DRAWS"),
    "on numpy draws": Trap(module=OnNumpyDraws, plans=("zero3",), equal=BESIDE),
    "on torch draws": Trap(module=OnTorchDraws, plans=("zero3", "cut"), equal=BESIDE, reason="DRAWS"),
    "on queue": Trap(module=OnQueue, plans=("zero3",), equal=BESIDE),
    "on space": Trap(module=OnSpace, plans=("pp2",), reason="SPACE"),
    "on closure": Trap(module=OnClosure, plans=("zero3", "pp2"), equal=BESIDE, reason="count"),
    "on function": Trap(module=OnFunction, plans=("zero3", "pp2"), equal=BESIDE, reason="count"),
    "on default": Trap(module=OnDefault, plans=("zero3", "tp2"), equal=BESIDE, reason="held"),
    "in block": Trap(module=InBlock, plans=SOME, equal=("auto",), reason="runs"),
    "more rows": Trap(module=MoreRows, plans=("cut", "pp2cut"), reason="HELD"),
    "late": Trap(module=Late, plans=LATE, equal=BESIDE, reason="HELD"),
    "late attribute": Trap(module=LateAttribute, plans=LATE, equal=BESIDE, reason="count"),
    "late class": Trap(module=LateClass, plans=("tp2",), reason="count"),
    "late in block": Trap(module=LateInBlock, plans=("zero1", "zero3"), equal=("zero1",), reason="recomputed"),
    "remembered": Trap(module=Remembered, plans=("pp2", "cut"), reason="last"),
    "sparse": Trap(module=Sparse, plans=("pp2", "zero1"), reason="sparse"),
    "harmless": Trap(module=Harmless, plans=EVERY[1:], equal=EVERY[1:]),
}
