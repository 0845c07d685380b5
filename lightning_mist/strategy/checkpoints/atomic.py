"""A checkpoint takes its name when it is whole: it is written under another one in the same folder, and renamed.

What a kill leaves behind under that other name is written over when the same checkpoint is saved again.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

META = "meta.pt"
"""In a directory: what is beside weights and optimizer state, as in sharded directories of Lightning itself."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it takes its name; Lightning takes nothing of that name for a checkpoint."""
    return path.with_name(f".partial-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}")


def save_file(checkpoint: Any, path: Path) -> None:
    """Write one file, tensor by tensor, through to the disk.

    Raises:
        IsADirectoryError: If there is a directory of that name that is no checkpoint.
    """
    refuse_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    remove(partial)
    try:
        with open(partial, "xb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        publish(partial, path)
    except BaseException:
        remove(partial)
        raise


def refuse_folder(path: Path) -> None:
    """Raise ``IsADirectoryError`` if a checkpoint of this name would replace a folder that holds something else."""
    if path.is_dir() and not (path / META).is_file() and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a folder and no checkpoint (it has no {META}): a checkpoint would replace it. Give the name of "
            f"what is to be written, such as {path / 'last.ckpt'}"
        )


def publish(partial: Path, path: Path) -> None:
    """Give what is whole its name; what had it before is removed afterwards."""
    is_folder = path.is_dir() and not path.is_symlink()
    if os.path.lexists(path) and (is_folder or partial.is_dir()):
        _exchange(partial, path)
    else:
        os.replace(partial, path)
    sync_folder(path.parent)
    remove(partial)


def discard(path: Path) -> None:
    """Remove a checkpoint; of a directory nothing is left under its name, whenever this is killed."""
    if path.is_dir() and not path.is_symlink():
        partial = partial_path(path)
        remove(partial)
        os.replace(path, partial)
        path = partial
    remove(path)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Write a folder's names through to the disk, where folders can be opened."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(partial: Path, path: Path) -> None:
    """Let two names change places: at once on Linux's own file systems, else with a moment when ``path`` is absent.

    What it was is beside it in that moment, under the name of ``partial`` with ``-before``.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(partial), os.fsencode(path)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    before = partial.with_name(f"{partial.name}-before")
    remove(before)
    os.replace(path, before)
    os.replace(partial, path)
    os.replace(before, partial)
