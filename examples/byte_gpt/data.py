"""The Python standard library's own sources, as bytes: a corpus that every machine has."""

import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

HELD_OUT = 20
"""Every twentieth file is for validation."""

SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
"""Folders left out: what is not the library, and test data in odd encodings."""


def source_files() -> list[Path]:
    """The library's ``.py`` files, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"{root} holds no .py file: this Python was installed without its library's sources")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Adjacent windows of a byte string, each with its successor bytes as targets."""

    def __init__(self, text: bytes, length: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.bytes[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


class StandardLibrary(pl.LightningDataModule):
    """Training and validation windows.

    Args:
        length: Bytes per window.
        batch_size: Windows per batch and process.
        val_windows: Windows to validate on, of those held out.
    """

    def __init__(self, length: int = 128, batch_size: int = 16, val_windows: int = 256) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size
        self.val_windows = val_windows

    def setup(self, stage: str) -> None:
        """Read the files."""
        files = source_files()
        held_out = [path.read_bytes() for path in files[::HELD_OUT]]
        kept = [path.read_bytes() for index, path in enumerate(files) if index % HELD_OUT]
        self.train = Windows(b"\n".join(kept), self.length)
        self.val = Windows(b"\n".join(held_out)[: self.val_windows * self.length + 1], self.length)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Shuffled windows."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The held-out windows, in order."""
        return DataLoader(self.val, batch_size=self.batch_size)
