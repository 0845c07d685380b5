"""Estimates as JSON and back: bytes, and names that stay."""

import json
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, cast, get_args, get_origin, get_type_hints

from lightning_mist.estimate.estimate_data import MemoryEstimate
from lightning_mist.plan import Plan, from_json, to_json

SCHEMA = 1
"""The version of the document."""

_PAIRS = ("terms", "values")
"""Fields of records that hold pairs of a name and a number: objects in JSON."""


def as_data(value: Any) -> Any:
    """A record as JSON has it: fields by name, plans as in plan files."""
    if isinstance(value, Plan):
        return json.loads(to_json(value))
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: dict(item) if name in _PAIRS else as_data(item) for name, item in found.items()}
    return [as_data(item) for item in value] if isinstance(value, tuple) else value


def estimate_to_json(estimate: MemoryEstimate) -> str:
    """An estimate as text, with its verdict; equal estimates give equal text."""
    derived = {"schema": SCHEMA, "verdict": estimate.verdict, "worst_stage": estimate.worst.stage}
    return json.dumps({**derived, **as_data(estimate)}, indent=1, allow_nan=False) + "\n"


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
    schema = document.pop("schema", None) if isinstance(document, dict) else SCHEMA
    if schema != SCHEMA:
        raise ValueError(f"schema = {schema}: this version of lightning_mist reads estimates of schema {SCHEMA}")
    if isinstance(document, dict):
        document = {name: value for name, value in document.items() if name not in ("verdict", "worst_stage")}
    return cast(MemoryEstimate, _read(MemoryEstimate, document, ""))


def _read(kind: Any, value: Any, path: str) -> Any:
    """A value of a type: records by their fields, plans as in plan files."""
    if kind is Plan:
        return from_json(json.dumps(value))
    if is_dataclass(kind):
        return _read_record(kind, value, path)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_read(item, each, f"{path}[{index}]") for index, each in enumerate(value))
    if value is not None and (records := [item for item in get_args(kind) if is_dataclass(item)]):
        return _read(records[0], value, path)
    return value


def _read_record(kind: Any, value: Any, path: str) -> Any:
    where = path or "the estimate"
    if not isinstance(value, dict):
        raise ValueError(f"{where} = {value!r}: an object with keys is needed")
    known, types = {field.name: field for field in fields(kind)}, get_type_hints(kind)
    for name in value:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}: the key {name!r} is not known; the nearest is {near!r}")
    for name, field in known.items():
        if name not in value and field.default is MISSING:
            raise ValueError(f"{where}: the key {name!r} is missing: an estimate needs it")
    inner = f"{path}." if path else ""
    return kind(
        **{
            name: tuple(item.items()) if name in _PAIRS else _read(types[name], item, inner + name)
            for name, item in value.items()
        }
    )
