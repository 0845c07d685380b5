"""Estimates as JSON: bytes, and names that stay."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from lightning_mist.estimate.estimate_data import MemoryEstimate
from lightning_mist.plan import Plan, to_json

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
