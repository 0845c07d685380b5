"""Data for projects that would download theirs: random, of the same form, the same in every run."""

import struct
from pathlib import Path

import numpy as np

SEED = 0


def write_mnist(folder: Path) -> None:
    """Random digits as torchvision's dataset stores the real ones, in their number."""
    folder = folder / "MNIST" / "raw"
    if folder.exists():
        return
    folder.mkdir(parents=True)
    generator = np.random.default_rng(SEED)
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = generator.integers(0, 10, count, dtype=np.uint8)
        # The header says: bytes, in so many dimensions, of these sizes.
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape) + images.tobytes()
        )
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + labels.tobytes())


def write_words(path: Path, words: int) -> None:
    """A text of words that follow each other as often as small numbers do."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(SEED).zipf(1.5, words) % 500
    path.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in drawn.reshape(-1, 20)))


def write_pictures(folder: Path, classes: int, each: int) -> None:
    """Folders of small random pictures, one per class, for training and validation."""
    from PIL import Image

    if folder.exists():
        return
    generator = np.random.default_rng(SEED)
    for part in ("train", "val"):
        for number in range(classes):
            place = folder / part / f"class{number}"
            place.mkdir(parents=True)
            for index in range(each):
                pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{index}.png")
