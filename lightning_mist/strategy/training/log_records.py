"""``self.log`` happens where a step runs, and counts where its batch was loaded.

While the engine runs a user's step, ``log`` and ``log_dict`` of the module only record. Afterwards every rank receives
the records of its own batch, combines those of its microbatches and replays them once through the real ``self.log``.
So each rank makes the same calls in the same order as under plain data parallelism.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.runtime.cutting import ResultKey, Way, together
from lightning_mist.tensor_parallel import whole

_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Parameters of ``LightningModule.log`` after the value, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One call of ``self.log``; ``batch_value`` is what a metric object gave for its rows, if a single number."""

    name: str
    value: Any
    arguments: tuple[tuple[str, Any], ...]
    batch_value: Tensor | None = None


class LogRecorder:
    """Stands in for ``log`` and ``log_dict`` of a module; keeps the calls of the step that runs."""

    def __init__(self) -> None:
        self.records: list[LogRecord] = []

    def log(self, name: str, value: Any, *positional: Any, **arguments: Any) -> None:
        """Record one value; has the arguments of ``LightningModule.log``."""
        arguments = {**dict(zip(_ARGUMENTS[: len(positional)], positional, strict=True)), **arguments}
        # Modes that watch the step must not see what is done here.
        with torch._C.DisableTorchFunction():
            # All tensor-parallel ranks are here at the same time, and only one of them tells later.
            value = whole(value)
            if isinstance(value, Tensor):
                value = value.detach().clone()
            given = whole(getattr(value, "_forward_cache", None))  # what torchmetrics keeps of its last call
            batch_value = given.detach().clone() if isinstance(given, Tensor) and given.numel() == 1 else None
        self.records.append(
            LogRecord(name=name, value=value, arguments=tuple(arguments.items()), batch_value=batch_value)
        )

    def log_dict(self, dictionary: Mapping[str, Any], *positional: Any, **arguments: Any) -> None:
        """Record several values with common arguments."""
        # A MetricCollection gives copies unless told otherwise, and Lightning logs the metrics themselves.
        is_collection = hasattr(dictionary, "_enable_compute_groups")
        items = dictionary.items(keep_base=False, copy_state=False) if is_collection else dictionary.items()  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, *positional, **arguments)

    def take(self) -> tuple[LogRecord, ...]:
        """The calls since the last time, which are forgotten."""
        records, self.records = tuple(self.records), []
        return records


@contextmanager
def recorded_logs(module: Any, recorder: LogRecorder | None = None) -> Iterator[LogRecorder]:
    """Let a recorder answer the module's ``log`` and ``log_dict`` inside the context.

    Lightning modules inside the module log through the same trainer, so the recorder answers theirs too.
    """
    recorder = LogRecorder() if recorder is None else recorder
    inner = module.modules() if isinstance(module, nn.Module) else ()
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


def _combine(key: ResultKey, values: Sequence[Any], weights: Sequence[float], ways: Mapping[ResultKey, Way]) -> Any:
    if len(values) == 1 or not all(isinstance(value, (Tensor, int, float)) for value in values):
        return values[-1]  # metric objects keep their own state: one call stands for all
    return together(key, values, weights, ways.get(key, "mean"))


def combine_records(
    parts: Sequence[tuple[float, Sequence[LogRecord]]], ways: Mapping[ResultKey, Way]
) -> tuple[LogRecord, ...]:
    """One record per logged name for the microbatches of one batch: what would be logged for the whole batch.

    Args:
        parts: For each microbatch its share of the batch's rows and what was logged in it.
        ways: How the whole batch's values follow from those of its parts, where that is known: means, weighted by rows,
            where it is not. What an epoch makes of batches (``reduce_fx``) does not matter here.

    Returns:
        Records in the order of first appearance. A metric object's value of the step becomes the mean of those of its
        parts; its state, and so its value of the epoch, is its own.
    """
    grouped: dict[tuple[str, int], list[tuple[float, LogRecord]]] = {}
    for weight, records in parts:
        seen: dict[str, int] = {}
        for record in records:
            occurrence = seen.get(record.name, 0)
            seen[record.name] = occurrence + 1
            grouped.setdefault((record.name, occurrence), []).append((weight, record))
    combined = []
    for (name, number), items in grouped.items():
        key, arguments = ("log", name, number), dict(items[0][1].arguments)
        weights = [weight for weight, _ in items]
        sizes = [dict(record.arguments).get("batch_size") for _, record in items]
        if all(size is not None for size in sizes):
            way = ways.get((*key, "batch_size"), "sum")
            arguments["batch_size"] = together((*key, "batch_size"), sizes, weights, way)
        value = _combine(key, [record.value for _, record in items], weights, ways)
        of_parts = [record.batch_value for _, record in items if record.batch_value is not None]
        if len(of_parts) == len(items) > 1:
            # Lightning shows this as the metric's value of the step; its state has seen all rows already.
            value._forward_cache = _combine((), of_parts, weights, {})
        combined.append(LogRecord(name=name, value=value, arguments=tuple(arguments.items())))
    return tuple(combined)


def replay(module: Any, records: Sequence[LogRecord]) -> None:
    """Log every record through the module itself."""
    for record in records:
        module.log(record.name, record.value, **dict(record.arguments))
