"""Batches of other sizes made from a real one: rows repeated, sequences thinned out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mist.tensors import batch_rows, batch_tensors, is_row_list, rebuild


def convert_batch(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch in containers of its own with every tensor changed."""
    return rebuild(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else None)


def sequence_length(batch: Any) -> int | None:
    """The length of the sequences: the second dimension that all matrices of integers share; ``None`` if none."""
    matrices = [t for t in batch_tensors(batch) if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()]
    lengths = {tensor.shape[1] for tensor in matrices}
    return lengths.pop() if len(lengths) == 1 and min(lengths) > 1 else None


def _taken(leaf: Any, dim: int, positions: Tensor) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.index_select(dim, positions.to(leaf.device))
    return leaf.take(positions.numpy(), axis=dim)


def resize_batch(batch: Any, rows: int, length: int | None) -> Any:
    """A batch of ``rows`` rows, the rows of the given one over and over, thinned out to ``length`` positions.

    Positions are taken evenly from the first to the last, so that padding at either end stays: a model may well run
    other operators on a batch without any. Every dimension after the first that is as long as the sequence is thinned,
    so that masks of several dimensions fit too.

    Raises:
        ValueError: If it is not certain what the rows of the batch are.
    """
    have, full = batch_rows(batch), sequence_length(batch)
    if have is None:
        raise ValueError(
            f"rows of a batch of type {type(batch).__name__} cannot be counted: its tensors must share dimension 0"
        )
    again = torch.arange(rows) % have
    thinned = length is not None and full is not None and length < full
    evenly = torch.arange(length or 0) * ((full or 1) - 1) // max(1, (length or 0) - 1)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, np.ndarray)):
            return type(leaf)(leaf[i % have] for i in range(rows)) if is_row_list(leaf, have) else None
        changed = _taken(leaf, 0, again) if leaf.ndim and rows != have else leaf
        for dim in range(1, changed.ndim if thinned else 0):
            if changed.shape[dim] == full:
                changed = _taken(changed, dim, evenly)
        return changed.contiguous() if isinstance(changed, Tensor) and changed.ndim else changed

    return rebuild(batch, change)


def device_of(batch: Any) -> torch.device:
    """Where a batch is: the device of its first tensor that is not on the host, if any."""
    devices = [tensor.device for tensor in batch_tensors(batch)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
