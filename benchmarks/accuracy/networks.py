"""Networks whose steps take about a tenth of a second on a CPU core, each an ordinary LightningModule with its loader.

``byte-gpt`` is that of ``examples/byte_gpt``; ``encoder`` has separate query, key and value projections, which tensor
parallelism can share out; ``residual`` is convolutional, and most of its bytes are activations.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS = 8
"""Rows of every process's batch."""

LAYERS = 8
"""Layers of every network."""

VOCABULARY = 512
CLASSES = 10
BATCHES = 64
"""Batches of a process's made-up data: more than any run takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A module and the data it trains on."""

    module: pl.LightningModule
    data: Any


class _Trained(pl.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class EncoderBlock(nn.Module):
    """Bidirectional attention and a perceptron, normalised afterwards, as in BERT (Devlin et al., 2018)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape ``(batch, length, width)``."""
        rows, length, width = x.shape
        q, k, v = (
            part(x).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(_Trained):
    """Predicts tokens from their context."""

    def __init__(self, layers: int = LAYERS, width: int = 192, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([EncoderBlock(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of every position."""
        tokens, targets = batch
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class ResidualBlock(nn.Module):
    """Two convolutions around which the input passes, as in ResNet (He et al., 2016), normalised in groups."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape ``(batch, channels, height, width)``."""
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(y)))


class Residual(_Trained):
    """Classifies images."""

    def __init__(self, layers: int = LAYERS, channels: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(channels) for _ in range(layers)])
        self.head = nn.Linear(channels, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of the class."""
        images, labels = batch
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=ROWS, drop_last=True)


def _encoder(processes: int) -> Workload:
    tokens = torch.randint(VOCABULARY, (2, processes * ROWS * BATCHES, 64))
    return Workload(module=Encoder(), data=_loader(*tokens))


def _residual(processes: int) -> Workload:
    images = torch.randn(processes * ROWS * BATCHES, 3, 56, 56)
    return Workload(module=Residual(), data=_loader(images, torch.randint(CLASSES, (len(images),))))


def _byte_gpt(processes: int) -> Workload:
    import sys

    from benchmarks.record import ROOT

    sys.path.insert(0, str(ROOT / "examples" / "byte_gpt"))
    from data import StandardLibrary
    from model import ByteGPT

    return Workload(module=ByteGPT(layers=LAYERS), data=StandardLibrary(batch_size=ROWS))


MAKERS = {"byte-gpt": _byte_gpt, "encoder": _encoder, "residual": _residual}
"""By name: what makes a network and its data, given the number of processes."""


def make(name: str, processes: int) -> Workload:
    """A network with its initial values, the same every time, and its data."""
    pl.seed_everything(0, verbose=False)
    return MAKERS[name](processes)
