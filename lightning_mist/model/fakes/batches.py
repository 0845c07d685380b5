"""Batches of other sizes made from a real one: rows repeated, sequences thinned out."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def _rebuild(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], items: Callable[[list[Any]], list[Any]]
) -> Any:
    """A copy of nested containers with tensors and lists of plain items changed."""

    def again(item: Any) -> Any:
        return _rebuild(item, change, items)

    result = value
    if isinstance(value, torch.Tensor):
        result = change(value)
    elif isinstance(value, Mapping):
        # copy.copy keeps what else a mapping of its own class knows (transformers' BatchEncoding).
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = again(item)  # type: ignore[index]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        result = type(value)(*map(again, value))
    elif isinstance(value, (list, tuple)):
        is_plain = value and not any(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in value)
        result = type(value)(items(list(value)) if is_plain else map(again, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not made anew: its constructor may want what no field keeps (``InitVar``), or compute fields itself.
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, again(getattr(value, field.name)))
    return result


def copy_containers(batch: Any) -> Any:
    """The batch in containers of its own, so that a step may change them."""
    return _rebuild(batch, lambda tensor: tensor, lambda items: items)


def convert_batch(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch in containers of its own with every tensor changed."""
    return _rebuild(batch, change, lambda items: items)


def batch_tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, in order: in mappings, sequences and dataclasses."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from batch_tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from batch_tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from batch_tensors(getattr(batch, field.name))


def batch_rows(batch: Any) -> int | None:
    """The number of rows: the first dimension that all tensors with dimensions share; ``None`` if they do not."""
    sizes = {tensor.shape[0] for tensor in batch_tensors(batch) if tensor.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None


def sequence_length(batch: Any) -> int | None:
    """The length of the sequences: the second dimension that all matrices of integers share; ``None`` if none."""
    matrices = [t for t in batch_tensors(batch) if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()]
    lengths = {tensor.shape[1] for tensor in matrices}
    return lengths.pop() if len(lengths) == 1 and min(lengths) > 1 else None


def _evenly(full: int, length: int, device: torch.device) -> torch.Tensor:
    """``length`` different positions out of ``full``, both ends among them if there are two at least."""
    return torch.arange(length, device=device) * (full - 1) // max(1, length - 1)


def resize_batch(batch: Any, rows: int, length: int | None) -> Any:
    """A batch of ``rows`` rows, the rows of the given one over and over, thinned out to ``length`` positions.

    Positions are taken evenly from the first to the last, so that padding at either end stays: a model may well run
    other operators on a batch without any. Every dimension after the first that is as long as the sequence is thinned,
    so that masks of several dimensions fit too.

    Raises:
        ValueError: If the tensors of the batch differ in their number of rows.
    """
    have, full = batch_rows(batch), sequence_length(batch)
    if have is None:
        raise ValueError("rows of a batch whose tensors differ in their first dimension cannot be counted")

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        if rows != have:
            tensor = tensor.index_select(0, torch.arange(rows, device=tensor.device) % have)
        if length is not None and full is not None and length < full:
            for dim in range(1, tensor.dim()):
                if tensor.shape[dim] == full:
                    tensor = tensor.index_select(dim, _evenly(full, length, tensor.device))
        return tensor.contiguous()

    def items(values: list[Any]) -> list[Any]:
        return [values[i % have] for i in range(rows)] if len(values) == have else values

    return _rebuild(batch, change, items)


def device_of(batch: Any) -> torch.device:
    """Where a batch is: the device of its first tensor that is not on the host, if any."""
    devices = [tensor.device for tensor in batch_tensors(batch)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
