"""What rebuilt reports are made of: how one is described, and parts that several use."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.uses.session import Session, Use
from tests.traps.project import LAYERS, VOCABULARY, WIDTH, Block, Project, loader

TOLERANCE = 1e-10
"""Largest difference of numbers in double precision, relative to the largest beside them."""


class Reports:
    """Collects reports of one theme: a decorator for the functions that rebuild them."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self.every: list[Use] = []
        self.layers: dict[str, int] = {}

    def __call__(
        self, thread: str, title: str, *, said: str = "", layers: int = LAYERS
    ) -> Callable[[Callable[[Session], Any]], Any]:
        """``@reports("owner/repository#1", "its title")`` above a function that takes a session.

        Args:
            said: As for uses.
            layers: Of the module, as a plan counts them: none where what is repeated runs more than once.
        """

        def keep(run: Callable[[Session], Any]) -> Callable[[Session], Any]:
            use = Use(theme=self.theme, name=f"{thread} {title}", run=run, tolerance=TOLERANCE, said=said)
            self.every.append(use)
            self.layers[use.key] = layers
            return run

        return keep

    def project(
        self, thread: str, title: str, *, said: str = "", layers: int = LAYERS, **options: Any
    ) -> Callable[[type], type]:
        """The same above a module without arguments, which is trained and validated with the trainer's options."""

        def keep(kind: type) -> type:
            self(thread, title, said=said, layers=layers)(lambda session: fitted(session, kind(), **options))
            return kind

        return keep


def fitted(session: Session, module: Any, **options: Any) -> Any:
    """Train a module, validated after each epoch."""
    return session.fit(module, **({"val": loader(16, seed=1)} | options))


def of(*blocks: nn.Module) -> nn.ModuleList:
    """Blocks in double precision, as a project has them."""
    return nn.ModuleList(blocks).double()


class Network(nn.Module):
    """The project's network apart from its training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Wrapped(Project):
    """A project whose network is a module of its own."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net = Network()

    def logits(self, batch: Any) -> Tensor:
        return self.net(batch["x"])


class Normed(nn.Module):
    """A block with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.norm(self.linear(hidden).transpose(1, 2)).transpose(1, 2))


class WithNorms(Project):
    """A project of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = of(*(Normed() for _ in range(LAYERS)))
