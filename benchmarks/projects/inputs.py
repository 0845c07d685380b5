"""Data for projects that would download theirs: random, of the same form, the same in every run."""

import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SEED = 0


@contextmanager
def _made(path: Path) -> Iterator[Path | None]:
    """Where to write what is to be at a path, whole at once since all ranks write it; None if it is there."""
    if path.exists():
        yield None
        return
    part = path.with_name(f"{path.name}.rank{os.environ['RANK']}")
    part.parent.mkdir(parents=True, exist_ok=True)
    yield part
    try:
        part.rename(path)
    except OSError:
        # A folder that a peer has made meanwhile.
        shutil.rmtree(part)


def write_mnist(folder: Path) -> None:
    """Random digits as torchvision's dataset stores the real ones, in their number."""
    with _made(folder / "MNIST") as made:
        if made is None:
            return
        (made / "raw").mkdir(parents=True)
        generator = np.random.default_rng(SEED)
        for name, count in (("train", 60_000), ("t10k", 10_000)):
            images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = generator.integers(0, 10, count, dtype=np.uint8)
            # The header says: bytes, in so many dimensions, of these sizes.
            for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
                header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
                (made / "raw" / f"{name}-{kind}-ubyte").write_bytes(header + values.tobytes())


def write_words(path: Path, words: int) -> None:
    """A text of words of which the first are the most frequent."""
    with _made(path) as made:
        if made is not None:
            drawn = np.random.default_rng(SEED).zipf(1.5, words) % 500
            made.write_text("\n".join(" ".join(f"w{word}" for word in line) for line in drawn.reshape(-1, 20)))


def write_pictures(folder: Path, classes: int, each: int) -> None:
    """Folders of small random pictures, one per class, for training and validation."""
    from PIL import Image

    with _made(folder) as made:
        if made is None:
            return
        generator = np.random.default_rng(SEED)
        for part in ("train", "val"):
            for number in range(classes):
                place = made / part / f"class{number}"
                place.mkdir(parents=True)
                for index in range(each):
                    pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{index}.png")
