"""What the user's step gave for the parts of a batch, brought to the rank that owns it and put together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from lightning_mist.errors import TraceError
from lightning_mist.strategy.logging import LogRecord, combine_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one microbatch brought, on its way to the rank that owns its rows."""

    index: int
    weight: float
    loss: Tensor | None
    extras: dict[str, Any]
    records: tuple[LogRecord, ...]
    random_state: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a user's step gave for the whole batch of this rank.

    Attributes:
        loss: Mean over the batch, or None if the step returned none.
        extras: Other entries of a returned dictionary.
        records: What the step logged.
    """

    loss: Tensor | None
    extras: dict[str, Any]
    records: tuple[LogRecord, ...]


def home(value: Any) -> Any:
    """A value as it travels to its owner: tensors without their graph, in host memory."""
    if isinstance(value, FakeTensor):
        raise TraceError(
            f"what the step returned or logged (shape {tuple(value.shape)}) depends on a parameter of another stage "
            "through a value that was not carried, a norm of all weights for example: log it in a hook, or use a plan "
            "with one stage"
        )
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: home(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(home(item) for item in value)
    return value


def merge_extra(parts: list[tuple[float, Any]]) -> Any:
    """One value of a returned dictionary from those of its microbatches.

    Scalar tensors and floats become their mean weighted by rows, other tensors are joined along their first dimension,
    dictionaries are merged entry by entry; of anything else the last microbatch's value is kept.
    """
    values = [value for _, value in parts]
    if len(values) == 1:
        return values[0]
    if all(isinstance(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: merge_extra([(w, value[name]) for w, value in parts if name in value]) for name in names}
    if all(isinstance(value, Tensor) and value.ndim > 0 for value in values):
        return torch.cat(values)
    if all(isinstance(value, float) or (isinstance(value, Tensor) and value.ndim == 0) for value in values):
        return sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
    return values[-1]


def _to(value: Any, device: torch.device) -> Any:
    """A value that came home, with its tensors where the user's step had them."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def combine(pieces: Sequence[Piece], device: torch.device) -> BatchResult:
    """What the step gave for a whole batch from what it gave for the parts, in the order of their rows.

    Args:
        pieces: The parts, in host memory.
        device: Where the user's step would have left its tensors.
    """
    records = combine_records([(piece.weight, piece.records) for piece in pieces])
    extras = {
        name: merge_extra([(piece.weight, piece.extras[name]) for piece in pieces if name in piece.extras])
        for name in dict.fromkeys(name for piece in pieces for name in piece.extras)
    }
    losses = [(piece.weight, piece.loss) for piece in pieces if piece.loss is not None]
    loss = None
    if losses:
        total = torch.stack([weight * value.reshape(()) for weight, value in losses]).sum()
        loss = total.to(device)
    # Lightning reduces logged tensors where they are, and a GPU's process group knows tensors of its GPU only.
    records = tuple(replace(record, value=_to(record.value, device)) for record in records)
    return BatchResult(loss=loss, extras=_to(extras, device), records=records)
