"""Projects under mixed precision that are trained wrongly where casts of weights are kept without care."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.traps.project import Project, Trap


class Single(Project):
    """In single precision, as mixed precision asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class HalfInside(Single):
    """Uses its head in two types of 16 bits, the second one behind the first."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.hidden(batch)
        first = self.head(hidden)
        with torch.autocast("cpu", torch.float16):
            second = self.head(hidden)
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float16)
        return F.cross_entropy((first.float() + second.float()).flatten(0, 1), batch["y"].flatten())


class WholeInside(Single):
    """Uses its head with and without casting."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.hidden(batch)
        first = self.head(hidden)
        with torch.autocast("cpu", enabled=False):
            second = self.head(hidden.float())
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
        return F.cross_entropy((first.float() + second).flatten(0, 1), batch["y"].flatten())


class TeacherFirst(Single):
    """Runs without gradients what it runs with them afterwards."""

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            target = self.logits(batch).float().softmax(-1)
        logits = self.logits(batch).float()
        return super().loss(batch) + (logits.softmax(-1) - target.roll(1, 0)).square().mean()


class OneLayer(Single):
    """Applies one layer again and again: gradients of its many uses are added up in 32 bits."""

    def hidden(self, batch: Any) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        for _ in range(12):
            hidden = hidden + 0.1 * self.pair(hidden).repeat(1, 1, hidden.shape[-1] // 2)
        return hidden


class Scales(Single):
    """Writes into a weight between two uses of it."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = self.hidden(batch)
        first = self.head(hidden)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        second = self.head(hidden)
        return F.cross_entropy((first.float() + 3 * second.float()).flatten(0, 1), batch["y"].flatten())


_EVERY = ("halves", "zero1", "cut", "pp2", "pp2cut", "tp2", "tp2cut")
_MIXED: dict[str, Any] = {"trainer": {"precision": "bf16-mixed"}, "plans": _EVERY, "tolerance": 1e-2}
"""Numbers of 8 bits, of which parts of a batch round other sums than the whole."""

TRAPS = {
    "plain": Trap(module=Single, equal=_EVERY, **_MIXED),
    "half inside": Trap(module=HalfInside, equal=_EVERY, **_MIXED),
    "whole inside": Trap(module=WholeInside, equal=_EVERY, **_MIXED),
    "teacher first": Trap(module=TeacherFirst, **(_MIXED | {"plans": ("halves", "zero1", "pp2", "auto")})),
    "one layer": Trap(module=OneLayer, equal=("halves", "zero1", "pp2", "pp2cut"), **_MIXED),
    "scales": Trap(module=Scales, reason="the step writes into parameter", **(_MIXED | {"plans": (*_EVERY, "auto")})),
}
