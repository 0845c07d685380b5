"""The user's step on parts of a batch: that nothing else than was proved happens, and results of parts put together."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.attributes import is_a
from lightning_mist.devices import to_device
from lightning_mist.errors import TraceError
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.runtime.cutting import (
    WAY_OUT,
    CutMode,
    CutRules,
    Result,
    ResultKey,
    Values,
    Way,
    alike,
    check_counts,
    cutting,
    is_close,
    leaves_of_result,
)
from lightning_mist.strategy.training.batch_exchange import BatchExchange
from lightning_mist.strategy.training.log_records import Finish, MetricCall, Record, combine_records, merged
from lightning_mist.tensors import leaves, rebuild, token_places

_SHARE_TOLERANCE = 1e-9


def results_of(extras: Mapping[str, Any], records: tuple[Record, ...]) -> list[Result]:
    """The results of a step other than its loss, one by one."""
    found = [leaf for name, value in extras.items() for leaf in leaves_of_result(("extra", name), value)]
    for record in records:
        if isinstance(record, MetricCall):
            found.append(Result(key=record.key, value=None))
            found += [
                leaf for name, value in record.value.items() for leaf in leaves_of_result((*record.key, name), value)
            ]
            continue
        found.append(Result(key=record.key, value=record.value))
        if (size := dict(record.arguments).get("batch_size")) is not None:
            found.append(Result(key=(*record.key, "batch_size"), value=size))
    return found


class _Batch:
    """What the parts of one batch have in common."""

    def __init__(self, rules: CutRules, whole: Values | None) -> None:
        self.rules, self.whole = rules, whole
        self._same: dict[Any, Any] = {}
        self._pairs: list[tuple[Any, Any, str]] = []
        self._wrong: list[tuple[Tensor, str]] = []
        self._counted: dict[Any, tuple[Tensor, Tensor, str]] = {}
        self._share = 0.0

    def finished(
        self,
        output: Any,
        *,
        records: Callable[[], tuple[Record, ...]],
        mode: CutMode,
        part: Microbatch,
        divisor: float,
    ) -> Any:
        """What the step returned for a part, once it was seen that it does what was proved."""
        if isinstance(output, dict) and "loss" not in output:
            return output  # Lightning itself refuses a dictionary without a loss
        extras = {name: value for name, value in output.items() if name != "loss"} if isinstance(output, dict) else {}
        mode.expect(("loss",), output.get("loss") if isinstance(output, dict) else output, "the loss")
        self._compare(results_of(extras, records()), mode, part)
        self._share += part.weight
        self._wrong += mode.wrong
        for key, (own, whole, line) in mode.counted.items():
            before = self._counted.get(key)
            self._counted[key] = (own if before is None else before[0] + own, whole, line)
        if divisor == 1.0:
            return output
        if isinstance(output, dict):
            loss = output.get("loss")
            return {**output, "loss": loss / divisor} if isinstance(loss, Tensor) else output
        return output / divisor if isinstance(output, Tensor) else output

    def _compare(self, results: list[Result], mode: CutMode, part: Microbatch) -> None:
        """See that a part gives what can be put together; whether values agree is for :meth:`check` to look at."""
        for result in results:
            way = self.rules.results.get(result.key)
            if way is None:
                raise TraceError(
                    f"{result.text} was not there when it was proved that batches may be cut: what it is for the whole "
                    f"batch is not known. {WAY_OUT}"
                )
            if isinstance(result.value, Tensor) and result.key[0] != "metric":
                mode.expect(result.key, result.value, result.text)
            if way == "same":
                # What all chunks of tokens have alike may be the sum of that of rows.
                key = (result.key, None if part.tokens is None else part.rows)
                self._pairs.append((self._same.setdefault(key, result.value), result.value, result.text))

    def tensors(self) -> Iterator[Tensor]:
        """What :meth:`check` looks at."""
        yield from (flag for flag, _ in self._wrong)
        yield from (value for pair in self._pairs for value in pair[:2] if isinstance(value, Tensor))
        yield from (value for counted in self._counted.values() for value in counted[:2])

    def check(self, copies: Mapping[int, Tensor]) -> None:
        """See that all parts did what was proved; ``copies`` as in :class:`PartSteps`."""

        def here(value: Any) -> Any:
            return copies.get(id(value), value)

        check_counts([(here(flag), line) for flag, line in self._wrong])
        for first, value, text in self._pairs:
            if not alike(here(first), here(value)):
                raise TraceError(
                    f"{text} is {value!r} for one part of a batch and {first!r} for another, and was the same for all "
                    f"when the plan was made. {WAY_OUT}"
                )
        # Whether counts add up can be seen only if all parts are known here.
        if abs(self._share - 1.0) > _SHARE_TOLERANCE:
            return
        for own, whole, line in self._counted.values():
            found, wanted = here(own), here(whole)
            if not is_close(found, wanted, 1e-4):
                raise TraceError(
                    f"the parts of a batch count {found.item():g} and the batch counts {wanted.item():g} at {line}: "
                    f"the loss's normaliser does not add up. {WAY_OUT}"
                )


class PartSteps:
    """Runs the step on the parts of batch after batch.

    Args:
        records: What the step logged for a part, by index, when it is finished.
    """

    def __init__(
        self, rules: CutRules | None, exchange: BatchExchange, records: Mapping[int, tuple[Record, ...]]
    ) -> None:
        self.rules, self._exchange, self._records = rules, exchange, records
        self._batches: dict[tuple[int, bool], _Batch] = {}
        self._places: tuple[tuple[int, int], ...] | None = None

    @property
    def ways(self) -> Mapping[ResultKey, Way]:
        """How results follow from those of parts; empty if nothing was proved."""
        return {} if self.rules is None else self.rules.results

    @property
    def chunk_ways(self) -> Mapping[ResultKey, Way]:
        """The same of a part from its chunks of tokens."""
        return {} if self.rules is None or self.rules.tokens is None else self.rules.tokens.results

    def begin(self) -> None:
        """The next batch begins."""
        self._batches.clear()

    def tensors(self) -> Iterator[Tensor]:
        """What :meth:`check` looks at."""
        for batch in self._batches.values():
            yield from batch.tensors()

    def check(self, copies: Mapping[int, Tensor]) -> None:
        """See that all parts did what was proved; copies are by originals' ``id``.

        That is after the last part: what was computed on a device is waited for once.
        """
        for batch in self._batches.values():
            batch.check(copies)
        self._batches.clear()

    def _check_places(self, batch: Any) -> None:
        """Refuse a batch of which other dimensions would be cut into chunks of tokens than of the first one."""
        places = token_places(batch)
        if self._places not in (None, places):
            raise TraceError(
                "a tensor of this batch has a dimension as long as its sequences that was of another size, or is not "
                "as long where it was: chunks of tokens would cut others than those that were proved. Use "
                "tail_chunks = 1, or other lengths of sequences"
            )
        self._places = places

    @contextmanager
    def around(self, microbatch: Microbatch) -> Iterator[Finish | None]:
        """Around the step on a part, or on a whole batch, which is left alone; what it returned is to be finished.

        Raises:
            TraceError: When it is finished, if something is not what was proved.
        """
        every, weight, tokens = microbatch.batch_rows, microbatch.weight, microbatch.tokens
        rules = self.rules if self.rules is None or tokens is None else self.rules.tokens
        if rules is None or weight in (0.0, 1.0) or every is None or (microbatch.rows is None and tokens is None):
            yield None
            return
        low, high = microbatch.rows or (0, every)
        if rules.is_of_one and high - low > 1:
            raise TraceError(
                f"{high - low} rows together are to be cut into chunks of tokens, as it was proved of one: use batches "
                "of as many rows as the first one's, or tail_chunks = 1"
            )
        batch = self._batches.get(key := (microbatch.owner, tokens is not None))
        if batch is None:
            every_row = self._exchange.whole_of(microbatch)
            if tokens is not None:
                self._check_places(every_row)
            batch = self._batches[key] = _Batch(rules, rules.measure(every_row, every))
        part, of = rules.measure(microbatch.value, high - low), {"rows": every, "batch": microbatch.value}
        # A chunk of tokens has its share of what counts, and all rows of its part.
        first, end = (low / every, high / every) if tokens is None else (0.0, weight)
        mode = CutMode(rules, batch.whole, part, first, end, own=high - low, **of)
        shares = ((self.ways, (high - low) / every), (self.chunk_ways, weight * every / (high - low)))
        divisor = prod(share for ways, share in shares if ways.get(("loss",)) == "sum")
        with cutting(mode):
            records = partial(self._records.__getitem__, microbatch.index)
            yield partial(batch.finished, records=records, mode=mode, part=microbatch, divisor=divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one microbatch brought, on its way to the rank that owns its rows, or all of a batch there."""

    index: int
    weight: float
    loss: Tensor | None
    extras: dict[str, Any]
    records: tuple[Record, ...]
    random_state: Any


def pieces_by_owner(
    microbatches: Sequence[Microbatch],
    outputs: Mapping[int, Any] | Sequence[Any],
    records: Mapping[int, tuple[Record, ...]],
    random_states: Sequence[Tensor | None],
    copies: Mapping[int, Tensor] = MappingProxyType({}),
    ways: Mapping[ResultKey, Way] = MappingProxyType({}),
) -> dict[int, list[Piece]]:
    """What microbatches brought, for the ranks that own their rows; nothing of those without rows.

    Outputs, records and states of generators are by the index of the microbatch.

    Args:
        copies: Tensors that are in host memory already, by the ``id`` of the original.
        ways: How results follow from those of chunks of tokens.
    """
    found: dict[int, list[Piece]] = {}
    chunks: dict[Any, list[Piece]] = {}
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
        if microbatch.tokens is None:
            found.setdefault(microbatch.owner, []).append(piece)
        else:
            chunks.setdefault((microbatch.owner, microbatch.rows), []).append(piece)
    for (owner, _), pieces in chunks.items():
        whole = combine(pieces, torch.device("cpu"), ways)
        loss = None if whole.loss is None else whole.loss / whole.weight
        found.setdefault(owner, []).append(replace(whole, loss=loss))
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


def moved(value: Any, device: torch.device) -> Any:
    """A value that came home, with its tensors where the user's step had them."""
    return rebuild(value, lambda node: to_device(node, device) if is_a(node, Tensor) else None)


def combine(
    pieces: Sequence[Piece], device: torch.device, ways: Mapping[ResultKey, Way] = MappingProxyType({})
) -> Piece:
    """The step's result for a whole batch from those for its parts, in the order of rows, on the step's device.

    Its loss is the sum of theirs by their weights, None if the step returned none.
    """
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
    weight = sum(piece.weight for piece in pieces)
    return replace(pieces[-1], weight=weight, loss=loss, extras=moved(extras, device), records=records)
