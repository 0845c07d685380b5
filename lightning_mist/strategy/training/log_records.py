"""``self.log`` happens where a step runs, and counts where its batch was loaded.

While the engine runs a user's step, ``log`` and ``log_dict`` of the module only record. Afterwards every rank receives
the records of its own batch, combines those of its microbatches and replays them once through the real ``self.log``.
So each rank makes the same calls in the same order as under plain data parallelism. Calls of metric objects are among
the records; see :mod:`.metric_calls`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import is_a, stored
from lightning_mist.errors import TraceError
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.runtime.cutting import ResultKey, Way, copied, together
from lightning_mist.strategy.training.metric_calls import (
    WAY_OUT,
    MetricCall,
    MetricRecorder,
    combine_calls,
    make_calls,
    named_metrics,
    standing_in,
)
from lightning_mist.tensor_parallel import whole

_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Parameters of ``LightningModule.log`` after the value, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One call of ``self.log``."""

    name: str
    value: Any
    arguments: tuple[tuple[str, Any], ...]


Record = LogRecord | MetricCall
"""What a step did that counts where its batch was loaded."""


Finish = Callable[[Any], Any]
"""Makes of what a step returned what the context around it, or the schedule, is given."""


class LogRecorder:
    """Stands in for ``log`` and ``log_dict`` of a module; keeps the calls of the step that runs.

    Attributes:
        metrics: Takes down calls of the module's metrics among them, if anybody does.
        of_parts: The calls of runs on microbatches, by the index of these.
    """

    metrics: MetricRecorder | None = None

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.of_parts: dict[int, tuple[Record, ...]] = {}

    def log(self, name: str, value: Any, *positional: Any, **arguments: Any) -> None:
        """Record one value; has the arguments of ``LightningModule.log``."""
        arguments = {**dict(zip(_ARGUMENTS[: len(positional)], positional, strict=True)), **arguments}
        value = original = value if self.metrics is None else self.metrics.portable(value)
        # Modes that watch the step must not see what is done here.
        with torch._C.DisableTorchFunction():
            # All tensor-parallel ranks are here at the same time, and only one of them tells later.
            value = whole(value)
            if is_a(value, Tensor):
                value = value.detach().clone()
        copied(original, value)
        self.records.append(LogRecord(name=name, value=value, arguments=tuple(arguments.items())))

    def log_dict(self, dictionary: Mapping[str, Any], *positional: Any, **arguments: Any) -> None:
        """Record several values with common arguments."""
        # A MetricCollection gives copies unless told otherwise, and Lightning logs the metrics themselves.
        is_collection = stored(dictionary, "_enable_compute_groups") is not None
        items = dictionary.items(keep_base=False, copy_state=False) if is_collection else dictionary.items()  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, *positional, **arguments)

    def keep(self, record: Record) -> None:
        """Take a record in."""
        self.records.append(record)

    def forget(self) -> None:
        """Keep nothing: where a step is left early its last calls are not taken, and may hold its graph."""
        self.records, self.metrics = [], None
        self.of_parts.clear()

    def take(self) -> tuple[Record, ...]:
        """The calls since the last time, which are forgotten."""
        records, self.records = tuple(self.records), []
        return tuple(item.settled() if isinstance(item, MetricCall) else item for item in records)

    @contextmanager
    def around(self, microbatch: Microbatch) -> Iterator[Finish]:
        """Around a run of the step, whose calls are kept."""
        self.records = []

        def finish(output: Any) -> Any:
            output = output if self.metrics is None else self.metrics.finished(output)
            self.of_parts[microbatch.index] = self.take()
            return output

        with nullcontext() if self.metrics is None else self.metrics.recording():
            yield finish


@contextmanager
def recorded_logs(
    module: Any, recorder: LogRecorder | None = None, *, with_metrics: bool = False, has_loss: bool = True
) -> Iterator[LogRecorder]:
    """Let a recorder answer the module's ``log`` and ``log_dict``, and perhaps its metrics, inside the context.

    Lightning modules inside the module log through the same trainer, so the recorder answers theirs too.
    """
    recorder = LogRecorder() if recorder is None else recorder
    recorder.of_parts.clear()
    if with_metrics:
        metrics = named_metrics(module)
        recorder.metrics = MetricRecorder(metrics, recorder.keep, has_loss=has_loss)
        with standing_in(metrics.values()), recorded_logs(module, recorder):
            yield recorder
        return
    inner = module.modules() if is_a(module, nn.Module) else ()
    loggers = {id(item): item for item in (module, *inner) if hasattr(type(item), "log_dict")}
    before = [(item.__dict__, item.__dict__.get("log"), item.__dict__.get("log_dict")) for item in loggers.values()]
    for item in loggers.values():
        item.__dict__["log"], item.__dict__["log_dict"] = recorder.log, recorder.log_dict
    try:
        yield recorder
    finally:
        for space, *answers in before:
            for name, answer in zip(("log", "log_dict"), answers, strict=True):
                if answer is None:
                    del space[name]
                else:
                    space[name] = answer


def combine_records(
    parts: Sequence[tuple[float, Sequence[Record]]], ways: Mapping[ResultKey, Way]
) -> tuple[Record, ...]:
    """One record per logged name for the microbatches of one batch: what would be logged for the whole batch.

    Args:
        parts: For each microbatch its share of the batch's rows and what was recorded in it.
        ways: How the whole batch's values follow from those of its parts, where that is known: means, weighted by rows,
            where it is not. What an epoch makes of batches (``reduce_fx``) does not matter here.

    Returns:
        Records in the order of first appearance.

    Raises:
        TraceError: If parts called metrics differently.
    """
    grouped: dict[ResultKey, list[tuple[float, Record]]] = {}
    for weight, records in parts:
        seen: dict[str, int] = {}
        for record in records:
            if isinstance(record, MetricCall):
                key = record.key
            else:
                occurrence = seen.get(record.name, 0)
                seen[record.name] = occurrence + 1
                key = ("log", record.name, occurrence)
            grouped.setdefault(key, []).append((weight, record))
    combined: list[Record] = []
    for key, items in grouped.items():
        weights = [weight for weight, _ in items]
        logged = [record for _, record in items if isinstance(record, LogRecord)]
        calls = [record for _, record in items if isinstance(record, MetricCall)]
        if calls and len(calls) != len(parts):
            raise TraceError(f"{key[1]} is called for some parts of a batch and not for others. {WAY_OUT}")
        combined.append(combine_calls(calls, weights, ways) if calls else _logged(key, logged, weights, ways))
    return tuple(combined)


def _logged(
    key: ResultKey, records: Sequence[LogRecord], weights: Sequence[float], ways: Mapping[ResultKey, Way]
) -> LogRecord:
    """What would be logged for the whole batch, from that for its parts."""
    arguments = dict(records[0].arguments)
    sizes = [dict(record.arguments).get("batch_size") for record in records]
    if all(size is not None for size in sizes):
        way = ways.get((*key, "batch_size"), "sum")
        arguments["batch_size"] = together((*key, "batch_size"), sizes, weights, way)
    values = [record.value for record in records]
    value = values[-1]
    if len(values) > 1 and all(is_a(item, (Tensor, int, float)) for item in values):
        value = together(key, values, weights, ways.get(key, "mean"))
    return replace(records[0], value=value, arguments=tuple(arguments.items()))


def replay(module: Any, records: Sequence[Record], extras: Any = None) -> Any:
    """Log every record through the module itself, and make the calls of its metrics.

    Returns:
        The extras, with what metrics gave where that stands in them.
    """
    make, found = make_calls(module)
    for record in records:
        if isinstance(record, MetricCall):
            make(record)
        else:
            module.log(record.name, found(record.value), **dict(record.arguments))
    return found(extras)
