"""Estimates as JSON and back: bytes, and names that stay."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from lightning_mist.estimate.estimate_data import Change, MemoryEstimate, PeakTensor, StageEstimate
from lightning_mist.estimate.uncertainty import Interval
from lightning_mist.plan import Plan, from_json, to_json

SCHEMA = 1
"""The version of the document."""

T = TypeVar("T")


def estimate_to_json(estimate: MemoryEstimate) -> str:
    """An estimate as text, with its verdict; equal estimates give equal text."""
    document = {
        "schema": SCHEMA,
        "verdict": estimate.verdict,
        "worst_stage": estimate.worst.stage,
        "model": estimate.model,
        "cluster": estimate.cluster,
        "memory_limit": estimate.memory_limit,
        "precision": estimate.precision,
        "optimizer": estimate.optimizer,
        "source": estimate.source,
        "stages": [
            {
                **{field.name: getattr(stage, field.name) for field in fields(StageEstimate)},
                **{name: asdict(getattr(stage, name)) for name in _INTERVALS},
                "terms": dict(stage.terms),
                **{name: [asdict(tensor) for tensor in getattr(stage, name)] for name in _TENSORS},
            }
            for stage in estimate.stages
        ],
        "changes": [
            {
                "text": change.text,
                "runs": change.runs,
                "device_total": asdict(change.device_total),
                "plan": json.loads(to_json(change.plan)),
            }
            for change in estimate.changes
        ],
        "notes": list(estimate.notes),
        "plan": json.loads(to_json(estimate.plan)),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def estimate_from_json(text: str) -> MemoryEstimate:
    """The estimate that a text describes; its verdict follows from its figures.

    Raises:
        ValueError: If the text is not an estimate of a schema that this version reads.
        PlanError: If one of its plans contradicts itself.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the estimate is not JSON: {error}; give what `lightning-mist estimate --json` wrote"
        ) from None
    values = dict(_object(document, "the estimate"))
    schema = values.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"schema = {schema}: this version of lightning_mist reads estimates of schema {SCHEMA}")
    for derived in ("verdict", "worst_stage"):
        values.pop(derived, None)
    return _make(
        MemoryEstimate,
        values,
        "the estimate",
        stages=lambda item: tuple(_stage(stage, f"stages[{i}]") for i, stage in enumerate(item)),
        changes=lambda item: tuple(_change(change, f"changes[{i}]") for i, change in enumerate(item)),
        notes=tuple,
        plan=_plan,
    )


_TENSORS = ("tensors", "kinds")
_INTERVALS = ("allocated", "reserved", "device_total")


def _stage(value: object, path: str) -> StageEstimate:
    return _make(
        StageEstimate,
        _object(value, path),
        path,
        devices=tuple,
        terms=lambda item: tuple(item.items()),
        **{name: lambda item: tuple(_make(PeakTensor, _object(t, path), path) for t in item) for name in _TENSORS},
        **{name: lambda item: _make(Interval, _object(item, path), path) for name in _INTERVALS},
    )


def _change(value: object, path: str) -> Change:
    return _make(
        Change,
        _object(value, path),
        path,
        plan=_plan,
        device_total=lambda item: _make(Interval, _object(item, path), f"{path}.device_total"),
    )


def _plan(value: object) -> Plan:
    return from_json(json.dumps(value))


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path} = {value!r}: an object with keys is needed")
    return value


def _make(cls: type[T], values: Mapping[str, Any], path: str, **readers: Any) -> T:
    """One record, its values read by readers where they need one."""
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{path}: the key {name!r} is not known; the nearest is {near!r}")
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ValueError(f"{path}: the key {name!r} is missing: an estimate needs it")
    return cls(**{name: readers.get(name, lambda item: item)(value) for name, value in values.items()})
