"""What the user's step gave for the parts of a batch, brought to the rank that owns it and put together."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.attributes import is_a
from lightning_mist.devices import to_device
from lightning_mist.errors import TraceError
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.runtime.cutting import ResultKey, Way, together
from lightning_mist.strategy.training.log_records import Record, combine_records
from lightning_mist.tensors import leaves, rebuild


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one microbatch brought, on its way to the rank that owns its rows."""

    index: int
    weight: float
    loss: Tensor | None
    extras: dict[str, Any]
    records: tuple[Record, ...]
    random_state: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a user's step gave for the whole batch of this rank; its loss is the mean, None if it returned none."""

    loss: Tensor | None
    extras: dict[str, Any]
    records: tuple[Record, ...]


def pieces_by_owner(
    microbatches: Sequence[Microbatch],
    outputs: Sequence[Any],
    records: Mapping[int, tuple[Record, ...]],
    random_states: Sequence[Tensor | None],
    copies: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, list[Piece]]:
    """What microbatches brought, for the ranks that own their rows; nothing of those without rows.

    Outputs, records and states of generators are by the index of the microbatch.

    Args:
        copies: Tensors that are in host memory already, by the ``id`` of the original.
    """
    found: dict[int, list[Piece]] = {}
    for microbatch in microbatches:
        if microbatch.weight == 0.0:
            continue
        output = outputs[microbatch.index]
        values = dict(output) if is_a(output, dict) else {"loss": output}
        loss = values.pop("loss", None)
        piece = Piece(
            index=microbatch.index,
            weight=microbatch.weight,
            loss=home(loss, copies),
            extras=home(values, copies),
            records=tuple(
                replace(record, value=home(record.value, copies)) for record in records.get(microbatch.index, ())
            ),
            random_state=random_states[microbatch.index],
        )
        found.setdefault(microbatch.owner, []).append(piece)
    return found


def results_in(outputs: Sequence[Any], records: Mapping[int, tuple[Record, ...]]) -> Iterator[Tensor]:
    """The tensors of what steps returned and logged."""
    for value in (*outputs, *(record.value for of_one in records.values() for record in of_one)):
        yield from (leaf for leaf in leaves(value) if is_a(leaf, Tensor) and not is_a(leaf, FakeTensor))


def home(value: Any, copies: Mapping[int, Tensor] = MappingProxyType({})) -> Any:
    """A value as it travels to its owner: tensors without graph, in host memory, in containers of their classes."""

    def replace(node: Any) -> Any:
        if is_a(node, FakeTensor):
            raise TraceError(
                f"what the step returned or logged (shape {tuple(node.shape)}) depends on a parameter of another stage "
                "through a value that was not carried, a norm of all weights for example: log it in a hook, or use a "
                "plan with one stage"
            )
        if is_a(node, Mapping) and not is_a(node, MutableMapping):
            return {key: home(item, copies) for key, item in node.items()}  # neither pickled nor made again
        if not is_a(node, Tensor):
            return None
        copy = copies.get(id(node))
        return node.detach().cpu() if copy is None else copy

    return rebuild(value, replace)


def merge_extra(parts: list[tuple[float, Any]]) -> Any:
    """One value of a returned dictionary from those of its microbatches.

    Scalar tensors and floats become their mean weighted by rows, other tensors are joined along their first dimension,
    dictionaries are merged entry by entry; of anything else the last microbatch's value is kept.
    """
    values = [value for _, value in parts]
    if len(values) == 1:
        return values[0]
    if all(is_a(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: merge_extra([(w, value[name]) for w, value in parts if name in value]) for name in names}
    if all(is_a(value, Tensor) and value.ndim > 0 for value in values):
        return torch.cat(values)
    if all(is_a(value, float) or (is_a(value, Tensor) and value.ndim == 0) for value in values):
        return sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
    return values[-1]


def moved(value: Any, device: torch.device) -> Any:
    """A value that came home, with its tensors where the user's step had them."""
    return rebuild(value, lambda node: to_device(node, device) if is_a(node, Tensor) else None)


def merged(key: ResultKey, parts: list[tuple[float, Any]], ways: Mapping[ResultKey, Way]) -> Any:
    """One value of a returned dictionary from those of its microbatches, in the ways that are known."""
    values = [value for _, value in parts]
    if len(values) == 1 or not ways:
        return merge_extra(parts)
    if key in ways:
        return together(key, values, [weight for weight, _ in parts], ways[key])
    if all(is_a(value, dict) for value in values):
        return {name: merged((*key, name), [(w, value[name]) for w, value in parts], ways) for name in values[0]}
    if all(is_a(value, (list, tuple)) and len(value) == len(values[0]) for value in values):
        items = [merged((*key, index), [(w, v[index]) for w, v in parts], ways) for index in range(len(values[0]))]
        return type(values[0])(*items) if hasattr(values[0], "_fields") else type(values[0])(items)
    return merge_extra(parts)


def combine(
    pieces: Sequence[Piece], device: torch.device, ways: Mapping[ResultKey, Way] = MappingProxyType({})
) -> BatchResult:
    """The step's result for a whole batch from those for its parts, in the order of rows, on the step's device."""
    records = combine_records([(piece.weight, piece.records) for piece in pieces], ways)
    extras = {
        name: merged(("extra", name), [(p.weight, p.extras[name]) for p in pieces if name in p.extras], ways)
        for name in dict.fromkeys(name for piece in pieces for name in piece.extras)
    }
    losses = [(piece.weight, piece.loss) for piece in pieces if piece.loss is not None]
    loss = None
    if losses:
        total = torch.stack([weight * value.reshape(()) for weight, value in losses]).sum()
        loss = to_device(total, device)
    # Lightning reduces logged tensors where they are, and a GPU's process group knows tensors of its GPU only.
    records = tuple(replace(record, value=moved(record.value, device)) for record in records)
    return BatchResult(loss=loss, extras=moved(extras, device), records=records)
