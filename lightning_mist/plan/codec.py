"""Plan files: a plan as JSON that a person can read, edit, compare and commit.

Writing is canonical: the same plan gives the same bytes. Reading is strict: a key that nobody knows, a value of another
type or a missing key is a :class:`~lightning_mist.errors.PlanError` that names the place, such as
``stages[1].zero_stage``. A key whose field has a default may be left out.
"""

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints
from uuid import uuid4

from lightning_mist.errors import PlanError
from lightning_mist.plan.plan import (
    Plan,
    Predicted,
    PredictedStage,
    ScheduleName,
    StagePlan,
    StepWork,
    Transfers,
    UpdateAfter,
)
from lightning_mist.plan.stage_settings import Checkpointing, OffloadRatios, StageMesh, ZeroStage

SCHEMA = 1
"""The version of the plan file that this version writes, and the newest that it reads."""

_LATER = ("spent", "needs", "units")
"""What predictions of stages may lack."""

_RULE_KEYS = ("transfers", "update_after")

T = TypeVar("T")


def to_json(plan: Plan) -> str:
    """The plan as text; equal plans give equal bytes."""
    document = {
        "schema": SCHEMA,
        "global_batch_size": plan.global_batch_size,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        **({} if plan.data_parallel_size is None else {"data_parallel_size": plan.data_parallel_size}),
        "stages": [_stage_document(stage) for stage in plan.stages],
        "predicted": _predicted_document(plan.predicted),
        "fingerprint": dict(plan.fingerprint),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    # Inside a JSON string a newline is escaped, so this touches only the layout: lists of numbers go on one line.
    return re.sub(r"\[\n[\d,\s.e+-]+\]", lambda match: f"[{' '.join(match[0][1:-1].split())}]", text) + "\n"


def from_json(text: str) -> Plan:
    """The plan that a text describes.

    Raises:
        PlanError: If the text is not a plan of a schema this version reads, or the plan contradicts itself.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # the last for text nested beyond any plan
        raise PlanError(f"the plan is not JSON: {error}; give a file that `lightning-mist plan --out` wrote") from error
    return _plan(document)


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: If the file cannot be read or holds no valid plan; the message begins with its path.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PlanError(f"plan file {os.fspath(path)!r} cannot be read ({reason}): give the path of a plan") from error
    try:
        return from_json(text)
    except PlanError as error:
        raise PlanError(f"plan file {os.fspath(path)!r}: {error}") from error


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan; a reader sees the old file or the new one, never a part."""
    write_text(Path(path), to_json(plan))


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _stage_document(stage: StagePlan) -> dict[str, object]:
    kept, values = stage.checkpointing, {**asdict(stage.mesh), **asdict(stage)}
    values |= {"checkpointed_layers": kept.layers, "checkpointing": kept.kind, "zero_stage": int(stage.zero_stage)}
    values["offload"] = {kind: ratio for kind, ratio in values["offload"].items() if ratio is not None}
    return {key: values[key] for key, (_, default) in _STAGE.items() if key not in _SELDOM or values[key] != default}


def _predicted_document(predicted: Predicted | None) -> dict[str, object]:
    if predicted is None:
        return {"step_seconds": 0.0, "stages": []}
    stages = []
    for stage in predicted.stages:
        values = asdict(stage)
        for key in ("breakdown", *_LATER):
            values[key] = dict(values[key])
        stages.append({key: value for key, value in values.items() if value or key not in _LATER})
    defaults = Predicted(step_seconds=0.0, stages=())
    rules = {key: getattr(predicted, key) for key in _RULE_KEYS if getattr(predicted, key) != getattr(defaults, key)}
    work = {} if predicted.work is None else {"work": asdict(predicted.work)}
    return {"step_seconds": predicted.step_seconds, **rules, "stages": stages, **work}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise PlanError(f"the key {key!r} comes twice in one object: a key is given once; remove one of them")
        result[key] = value
    return result


def _no_constant(name: str) -> float:
    raise PlanError(f"the value {name}: numbers in a plan are finite; write a number")


@dataclass(frozen=True, slots=True)
class _Reader:
    """One object of the document and where it is, for messages."""

    values: dict[str, Any]
    path: str

    @classmethod
    def of(cls, value: object, path: str) -> "_Reader":
        if not isinstance(value, dict):
            raise PlanError(f"{path or 'the plan'} = {_brief(value)}: an object with keys is needed, {{...}}")
        return cls(value, path)

    def place(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def only(self, *known: str) -> None:
        """Refuse keys that nobody reads, naming the nearest known one."""
        for key in self.values:
            if key not in known:
                near = get_close_matches(key, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
                raise PlanError(f"{self.place(key)}: this key is not known; {hint}")

    def get(self, key: str, read: Callable[[object, str], T], default: Any = MISSING) -> T:
        if key in self.values:
            return read(self.values[key], self.place(key))
        if default is MISSING:
            raise PlanError(f"{self.place(key)} is missing: a plan needs it; add it")
        return cast(T, default)

    def build(self, make: Callable[[], T]) -> T:
        """Call a constructor that checks its values; its errors get the place in front."""
        try:
            return make()
        except PlanError as error:
            raise PlanError(f"{self.path}: {error}" if self.path else str(error)) from error


def _brief(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(value: object, path: str, rule: str) -> PlanError:
    return PlanError(f"{path} = {_brief(value)}: {rule}")


def _integer(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise _refuse(value, path, "a whole number is needed, such as 4")
    return value


def _number(value: object, path: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _refuse(value, path, "a number is needed, such as 0.25")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # 1e999 is read as infinity
        raise _refuse(str(value)[:20], path, "a finite number is needed, such as 0.25")
    return number


def _truth(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _refuse(value, path, "true or false is needed")
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _refuse(value, path, 'text in quotes is needed, such as "1f1b"')
    return value


def _list(read: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    def read_list(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _refuse(value, path, "a list is needed, [...]")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_list


def _mapping(read: Callable[[object, str], T]) -> Callable[[object, str], tuple[tuple[str, T], ...]]:
    def read_mapping(value: object, path: str) -> tuple[tuple[str, T], ...]:
        reader = _Reader.of(value, path)
        return tuple((key, read(item, reader.place(key))) for key, item in reader.values.items())

    return read_mapping


def _pair(value: object, path: str) -> tuple[int, int]:
    numbers = _list(_integer)(value, path)
    if len(numbers) != 2:
        raise _refuse(value, path, "two whole numbers are needed, the first layer and the one after the last: [0, 12]")
    return numbers[0], numbers[1]


def _zero_stage(value: object, path: str) -> ZeroStage:
    number = _integer(value, path)
    known = [int(stage) for stage in ZeroStage]
    if number not in known:
        raise _refuse(value, path, f"the ZeRO stages are {', '.join(map(str, known))}")
    return ZeroStage(number)


def _record(kind: type[T], **defaults: object) -> Callable[[object, str], T]:
    """Reads an object whose keys are the fields of a dataclass; those with a default may be left out."""
    hints = get_type_hints(kind)
    known = {field.name: field.default for field in fields(kind)} | defaults  # type: ignore[arg-type]

    def read(value: object, path: str) -> T:
        reader = _Reader.of(value, path)
        reader.only(*hints)
        values = {name: reader.get(name, _READERS[hint], known[name]) for name, hint in hints.items()}
        return reader.build(lambda: kind(**values))

    return read


_STAGE: dict[str, tuple[Callable[[object, str], Any], Any]] = {
    "layers": (_pair, MISSING),
    "devices": (_list(_integer), MISSING),
    "microbatch_size": (_integer, MISSING),
    "data_parallel_degree": (_integer, 1),
    "tensor_parallel_degree": (_integer, 1),
    "context_parallel_degree": (_integer, 1),
    "sequence_parallel": (_truth, False),
    "zero_stage": (_zero_stage, ZeroStage.NONE),
    "shard_degree": (_integer, None),
    "checkpointed_layers": (_integer, 0),
    "checkpointing": (_text, "full"),
    "offload": (_record(OffloadRatios), OffloadRatios()),
    "tail_chunks": (_integer, 1),
}
"""What reads each key of a stage, and the default of those that may be left out; in the order of what is written."""

_SELDOM = ("shard_degree", "checkpointing", "tail_chunks")
"""What is written of a stage only where it is not as by default."""


def _stage(value: object, path: str) -> StagePlan:
    reader = _Reader.of(value, path)
    reader.only(*_STAGE)
    values = {key: reader.get(key, read, default) for key, (read, default) in _STAGE.items()}
    mesh = {field.name: values.pop(field.name) for field in fields(StageMesh)}
    kept = {"layers": values.pop("checkpointed_layers"), "kind": values.pop("checkpointing")}
    return reader.build(lambda: StagePlan(mesh=StageMesh(**mesh), checkpointing=Checkpointing(**kept), **values))


def _predicted(value: object, path: str) -> Predicted | None:
    found = _record(Predicted, step_seconds=0.0, stages=())(value, path)
    # This is how a plan that nobody predicted is written, so that the file always has the same keys.
    return found if found.stages or found.step_seconds else None


_READERS: dict[Any, Callable[[object, str], Any]] = {
    int: _integer,
    int | None: lambda value, path: None if value is None else _integer(value, path),
    float: _number,
    float | None: _number,
    str: _text,
    ScheduleName: _text,  # the constructors check the words
    Transfers: _text,
    UpdateAfter: _text,
    tuple[tuple[str, float], ...]: _mapping(_number),
    tuple[tuple[str, str], ...]: _mapping(_text),
    tuple[tuple[str, tuple[float, ...]], ...]: _mapping(_list(_number)),
    tuple[StagePlan, ...]: _list(_stage),
    tuple[PredictedStage, ...]: _list(_record(PredictedStage)),
    Predicted | None: _predicted,
    StepWork | None: _record(StepWork),
}
"""What reads a field of a type."""


def _plan(document: object) -> Plan:
    reader = _Reader.of(document, "")
    schema = reader.get("schema", _integer)
    if schema != SCHEMA:
        newer = "update lightning_mist" if schema > SCHEMA else "make the plan anew with `lightning-mist plan`"
        raise PlanError(f"schema = {schema}: this version of lightning_mist reads plans of schema {SCHEMA}; {newer}")
    reader.only("schema", *(field.name for field in fields(Plan)))
    return _record(Plan)({key: value for key, value in reader.values.items() if key != "schema"}, "")
