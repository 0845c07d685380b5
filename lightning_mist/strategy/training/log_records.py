"""``self.log`` happens where a step runs, and counts where its batch was loaded.

While the engine runs a user's step, ``log`` and ``log_dict`` of the module only record. Afterwards every rank receives
the records of its own batch, combines those of its microbatches and replays them once through the real ``self.log``.
So each rank makes the same calls in the same order as under plain data parallelism.

Calls of the module's metric objects (torchmetrics) are among the records: where ranks run the step for each other, or
for parts of a batch, they only record, and the rank that loaded the batch makes them with the arguments of the whole of
it. So each rank's metrics hold what they hold under plain data parallelism, and reductions over ranks find it there.
What a metric gives is not known while the step runs: it may be logged, given to another metric or returned beside the
loss. A step that computes with it, or reads the state of a metric, is refused.
"""

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_mist.attributes import entries, is_a, own, stored
from lightning_mist.devices import used_generators
from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import inside_block, user_line
from lightning_mist.runtime.communication import Microbatch
from lightning_mist.runtime.cutting import ResultKey, Way, copied, together
from lightning_mist.tensor_parallel import whole
from lightning_mist.tensors import leaves, rebuild

WAY_OUT = "Use a plan with one stage, tensor_parallel_degree = 1 and whole batches"

_REGISTRIES = frozenset(vars(nn.Module()))
_DEPTH = 2
_STATE = ("update", "compute", "_update_count", "_forward_cache", "_computed")
"""What a metric has of its own beside its states."""


@dataclass(frozen=True, slots=True)
class MetricOf:
    """Stands for a metric of the module, on its way to another rank."""

    name: str


@dataclass(frozen=True, slots=True)
class OutputOf:
    """Stands for what a call of a metric gives, or for an entry of it."""

    call: ResultKey
    entry: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCall:
    """One call of a method of a metric; ``value`` has its arguments by position or name."""

    metric: str
    method: str
    number: int
    value: dict[int | str, Any]

    @property
    def key(self) -> ResultKey:
        """What tells it from other calls of a step, alike in every run."""
        return ("metric", f"{self.metric}.{self.method}", self.number)

    def settled(self) -> "MetricCall":
        """The call with whole tensors without a graph; on all ranks that share rows at once."""
        with torch._C.DisableTorchFunction():
            given = rebuild(whole(self.value), lambda x: x.detach() if is_a(x, Tensor) else None)
        return replace(self, value=given)

    def made(self, metric: Any, find: Callable[[Any], Any]) -> Any:
        """Make the call; ``find`` gives for what stands for something what it stands for."""
        given = rebuild(self.value, find)
        args = [value for name, value in given.items() if is_a(name, int)]
        return getattr(metric, self.method)(*args, **{k: v for k, v in given.items() if is_a(k, str)})


def combine_calls(calls: Sequence[MetricCall], weights: Sequence[float], ways: Mapping[ResultKey, Way]) -> MetricCall:
    """The call for a whole batch from those in its parts."""
    first = calls[0]
    if len(calls) == 1:
        return first
    given = {name: [call.value.get(name) for call in calls] for name in first.value}
    parts = {name: list(zip(weights, values, strict=True)) for name, values in given.items()}
    value = {name: merged((*first.key, name), each, ways, is_whole=True) for name, each in parts.items()}
    return replace(first, value=value)


def merged(
    key: ResultKey, parts: Sequence[tuple[float, Any]], ways: Mapping[ResultKey, Way], *, is_whole: bool = False
) -> Any:
    """One value, such as one of a returned dictionary, from those of its microbatches, in the ways that are known.

    Where none is, scalar tensors and floats become their mean weighted by rows, other tensors are joined along their
    first dimension, dictionaries are merged entry by entry; of anything else the last microbatch's value is kept.

    Args:
        is_whole: Whether every part has the whole of it, and a way is to be known of all.

    Raises:
        TraceError: If none is.
    """
    values = [value for _, value in parts]
    if len(values) == 1:
        return values[0]
    if key in ways:
        return together(key, values, [weight for weight, _ in parts], ways[key])
    if all(is_a(value, dict) for value in values):
        names = dict.fromkeys(name for value in values for name in value)
        found = {name: [(w, v.get(name)) for w, v in parts if is_whole or name in v] for name in names}
        return {name: merged((*key, name), each, ways, is_whole=is_whole) for name, each in found.items()}
    if (ways or is_whole) and all(is_a(value, (list, tuple)) and len(value) == len(values[0]) for value in values):
        every = [[(w, v[at]) for w, v in parts] for at in range(len(values[0]))]
        items = [merged((*key, at), each, ways, is_whole=is_whole) for at, each in enumerate(every)]
        return type(values[0])(*items) if hasattr(values[0], "_fields") else type(values[0])(items)
    if is_whole:
        raise TraceError(f"what the step gives {key[1]} for a whole batch does not follow from its parts. {WAY_OUT}")
    if all(is_a(value, float) or (is_a(value, Tensor) and value.ndim == 0) for value in values):
        return sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
    have_rows = all(is_a(value, Tensor) and value.ndim > 0 for value in values)
    return torch.cat(values) if have_rows else values[-1]


def _drawn() -> list[bytes]:
    """Where torch's generators stand."""
    states = torch.get_rng_state(), *(generator.get_state() for generator in used_generators())
    return [bytes(state.numpy()) for state in states]


def named_metrics(module: Any) -> dict[str, Any]:
    """The metric objects and collections of them that a module holds, also in lists and dictionaries, by name."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not is_a(module, nn.Module):
        return {}
    kinds, found, seen = (torchmetrics.Metric, torchmetrics.MetricCollection), dict[str, Any](), set[int]()
    for name, child in _places(module):
        if is_a(child, kinds) and id(child) not in seen:
            seen.add(id(child))
            found[name] = child
    return found


def held_by(metric: Any) -> dict[str, Any]:
    """What a metric has of its own by name: its states, and what it makes of them; nothing of a collection."""
    names = (*metric._defaults, *_STATE) if hasattr(metric, "_defaults") else ()
    return {name: vars(metric)[name] for name in names if name in vars(metric)}


def _places(module: nn.Module) -> Iterator[tuple[str, Any]]:
    modules = list(module.named_modules())
    yield from modules
    for name, child in modules:
        if type(child).__module__.partition(".")[0] in ("torch", "torchmetrics"):
            continue
        for attribute, value in list(entries(own(child))):
            if attribute not in _REGISTRIES:
                yield from _held(f"{name}.{attribute}".lstrip("."), value, _DEPTH)


def _held(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if type(value) not in (list, tuple, dict):
        if is_a(value, nn.Module):
            yield name, value
        return
    for key, item in (value.items() if is_a(value, dict) else enumerate(value)) if depth else ():
        yield from _held(f"{name}[{key!r}]", item, depth - 1)


# While a step runs -----------------------------------------------------------------------------------------------


class MetricOutput:
    """Stands for what a metric gives while a step runs: nothing can be computed with it."""

    __slots__ = ("_place", "_recorder")

    def __init__(self, recorder: "MetricRecorder", place: OutputOf) -> None:
        self._recorder, self._place = recorder, place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        metric = str(self._place.call[1]).rpartition(".")[0]
        self._recorder.refuse(f"the step computes with what metric {metric} gives ({name} at {_line()})")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = next(leaf for leaf in leaves([*args, *(kwargs or {}).values()]) if is_a(leaf, cls))
        own._refuse(getattr(func, "__name__", "a function of torch"))


def _line() -> str:
    return user_line(("torch", "torchmetrics", "lightning_mist", "contextlib"))


def _refusing(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self._refuse(name)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__bool__", "__float__"),
    *("__int__", "__index__", "__len__", "__iter__", "__getitem__", "__str__", "__format__", "__array__"),
):
    setattr(MetricOutput, _name, _refusing(_name))


class _Active(threading.local):
    recorder: "MetricRecorder | None" = None


_ACTIVE = _Active()


class _Recorded:
    """In front of a metric's class while calls record."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _recorder().called(self, "forward", args, kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        _recorder().called(self, "update", args, kwargs)

    def reset(self) -> None:
        _recorder().called(self, "reset", (), {})

    def compute(self) -> Any:
        _recorder().refuse_read(self, "compute()")

    def _compute_groups_create_state_ref(self, copy: bool = False) -> None:
        """What a collection does to the states of its members when it hands one out."""
        _recorder().called(self, "_compute_groups_create_state_ref", (copy,), {})

    def __hash__(self) -> int:
        return id(self)  # a metric's own goes by its states

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("_mist_away", ()):
            _recorder().refuse_read(self, name)
        return super().__getattr__(name)  # type: ignore[misc]


def _recorder() -> "MetricRecorder":
    if _ACTIVE.recorder is None:
        raise TraceError(f"a metric is used where no step runs, in a layer that is recomputed perhaps. {WAY_OUT}")
    return _ACTIVE.recorder


@functools.cache
def _recorded_class(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Recorded, kind), names)


class MetricRecorder:
    """Takes down what runs of a step do with the metrics of its module, inside :func:`standing_in`.

    Args:
        keep: Is given every call.
        has_loss: Whether the step returns a loss, which then is not what a metric gives.

    Attributes:
        refusal: What the step did that cannot be honoured; None if nothing.
    """

    def __init__(
        self, metrics: Mapping[str, Any], keep: Callable[[MetricCall], None], *, has_loss: bool = True
    ) -> None:
        self.refusal: str | None = None
        self._metrics, self._keep, self._has_loss = metrics, keep, has_loss
        self._names = {id(metric): name for name, metric in metrics.items()}
        self._counts: dict[str, int] = {}
        self._given: list[tuple[Tensor, type, int, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a run of the step.

        Raises:
            TraceError: If it did what cannot be honoured, though it may have gone on in spite of it.
        """
        self._counts, self._given = {}, []
        before, _ACTIVE.recorder = _ACTIVE.recorder, self
        try:
            yield
        finally:
            _ACTIVE.recorder = before
            if self.refusal is not None:
                self.refuse(self.refusal)

    def run(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """What a step returns for a batch, whose calls of metrics are taken down; see :meth:`recording`."""
        with self.recording():
            output = step(batch)
        return self.finished(output)

    def called(self, metric: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a metric was called."""
        name = self._name_of(metric)
        if inside_block():
            self.refuse(f"metric {name} is updated inside a layer (at {_line()})")
        label = f"{name}.{method}"
        number = self._counts[label] = self._counts.get(label, -1) + 1
        with torch._C.DisableTorchFunction():
            # All ranks that share rows are here at the same time.
            given = whole(as_place({**dict(enumerate(args)), **kwargs}))
            tensors = [leaf for leaf in leaves(given) if is_a(leaf, Tensor) and not leaf.is_inference()]
            self._given += [(tensor, type(tensor), tensor._version, name) for tensor in tensors]
        call = MetricCall(metric=name, method=method, number=number, value=given)
        self._keep(call)
        if method != "forward":
            return None
        if stored(metric, "_enable_compute_groups") is None:
            return MetricOutput(self, OutputOf(call.key))
        entries = [metric._set_name(key) for key in metric.keys(keep_base=True)]
        return {entry: MetricOutput(self, OutputOf(call.key, entry)) for entry in entries}

    def portable(self, value: Any) -> Any:
        """A logged value as it can go to another rank."""
        if id(value) in self._names:
            return MetricOf(self._names[id(value)])
        if not is_a(value, MetricOutput) and (is_a(value, _Recorded) or stored(value, "_update_count") is not None):
            self.refuse(f"the step logs a {type(value).__name__} that is not an attribute of the module")
        return as_place(value)

    def finished(self, output: Any) -> Any:
        """What a run of the step returned, with places in place of what metrics give."""
        for name, metric in self._metrics.items():
            for attribute in vars(metric).keys() & vars(metric)["_mist_away"].keys():
                self.refuse(f"the step sets {attribute} of metric {name}")
        for tensor, kind, version, name in self._given:
            if type(tensor) is kind and tensor._version != version:
                self.refuse(f"the step writes into a tensor after giving it to metric {name}")
        if not self._given and not self._counts:
            return output
        self._given = []
        loss = output.get("loss") if is_a(output, dict) else output
        if self._has_loss and is_a(loss, MetricOutput):
            self.refuse(f"the step returns what metric {loss._place.call[1]} gives as its loss")
        return output if is_a(output, Tensor) else as_place(output)

    def refuse_read(self, metric: Any, what: str) -> NoReturn:
        """Refuse to answer what a metric holds."""
        self.refuse(f"the step reads {what} of metric {self._name_of(metric)} (at {_line()})")

    def refuse(self, what: str) -> NoReturn:
        """End the step."""
        self.refusal = what
        raise TraceError(
            f"{what}. Metrics are updated where batches were loaded, when the step has run for all of their rows. "
            f"{WAY_OUT}"
        )

    def _name_of(self, metric: Any) -> str:
        name = self._names.get(id(metric))
        return self.refuse("the step uses a copy of a metric") if name is None else name


def as_place(value: Any) -> Any:
    """A nesting with places in place of what metrics give."""
    return rebuild(value, lambda node: node._place if is_a(node, MetricOutput) else None)


@contextmanager
def standing_in(metrics: Iterable[Any]) -> Iterator[None]:
    """Inside, methods of metrics record, to the recorder whose step runs on this thread."""
    classes: list[tuple[Any, type]] = []
    try:
        for metric in metrics:
            own = vars(metric)
            kind: Any = type(metric)
            classes.append((metric, kind))
            own["_mist_away"] = {name: own.pop(name) for name in held_by(metric)}
            metric.__class__ = _recorded_class(kind)
        yield
    finally:
        for metric, kind in classes:
            metric.__class__ = kind
            vars(metric).update(vars(metric).pop("_mist_away"))


_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
"""Parameters of ``LightningModule.log`` after the value, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One call of ``self.log``; ``number`` counts those of its name in a step."""

    name: str
    value: Any
    arguments: tuple[tuple[str, Any], ...]
    number: int = 0

    @property
    def key(self) -> ResultKey:
        """What tells it from other calls of a step, alike in every run."""
        return ("log", self.name, self.number)


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
        self.add(name, value, arguments)

    def add(self, name: str, value: Any, arguments: Mapping[str, Any]) -> None:
        """Take a call in."""
        number = sum(isinstance(item, LogRecord) and item.name == name for item in self.records)
        self.records.append(LogRecord(name=name, value=value, arguments=tuple(arguments.items()), number=number))

    def log_dict(self, dictionary: Mapping[str, Any], *positional: Any, **arguments: Any) -> None:
        """Record several values with common arguments."""
        # A MetricCollection gives copies unless told otherwise, and Lightning logs the metrics themselves.
        is_collection = stored(dictionary, "_enable_compute_groups") is not None
        items = dictionary.items(keep_base=False, copy_state=False) if is_collection else dictionary.items()  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, *positional, **arguments)

    def forget(self) -> None:
        """Keep nothing: where a step is left early its last calls are not taken, and may hold its graph."""
        self.records.clear()
        self.of_parts.clear()
        self.metrics = None

    def take(self) -> tuple[Record, ...]:
        """The calls since the last time, which are forgotten."""
        records = tuple(self.records)
        self.records.clear()
        return tuple(item.settled() if isinstance(item, MetricCall) else item for item in records)

    @contextmanager
    def around(self, microbatch: Microbatch) -> Iterator[Finish]:
        """Around a run of the step, whose calls are kept."""
        self.records.clear()

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
        recorder.metrics = MetricRecorder(metrics, recorder.records.append, has_loss=has_loss)
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
        for record in records:
            grouped.setdefault(record.key, []).append((weight, record))
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
    """Log every record through the module, make the calls of its metrics, and put what these gave into the extras."""
    metrics, given = functools.cache(lambda: named_metrics(module)), dict[Hashable, Any]()

    def found(node: Any) -> Any:
        if is_a(node, MetricOf):
            return metrics()[node.name]
        if not is_a(node, OutputOf):
            return None
        output = given[node.call]
        if node.entry is None:
            return output
        if node.entry not in output:
            raise TraceError(f"{node.call[1]} gives no {node.entry!r} but {sorted(output)}. {WAY_OUT}")
        return output[node.entry]

    for record in records:
        if isinstance(record, LogRecord):
            module.log(record.name, rebuild(record.value, found), **dict(record.arguments))
            continue
        before = _drawn()
        given[record.key] = record.made(metrics()[record.metric], found)
        if _drawn() != before:
            raise TraceError(
                f"metric {record.metric} draws random numbers, which the step would draw in another order. {WAY_OUT}"
            )
    return rebuild(extras, found)
