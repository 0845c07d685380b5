"""What became of a trap under a plan, beside DDP."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SINGLE = 2e-7
"""Lightning keeps sums of what is logged in single precision."""

GOOD = ("equal", "refused", "stopped", "as ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a fit went.

    Attributes:
        kind: ``equal``, ``refused`` when the plan was made, ``stopped`` while training, ``as ddp`` (the same error), or
            one that must not be: ``wrong``, ``crash``, ``hang``.
        text: What differs, or what was said.
        whole: Why the whole module was there for validation, if it was for a reason.
    """

    kind: str
    text: str = ""
    whole: str | None = None


def outcome_of(ddp: Sequence[Any], found: Sequence[Any], *, tolerance: float, is_late: bool, output: str) -> Outcome:
    """The outcome of a fit.

    Args:
        ddp: What every rank saw under DDP.
        found: What every rank saw under the plan; ``None`` of one that ended without a word.
        tolerance: Largest relative difference of numbers.
        is_late: Whether time ran out.
        output: What the processes printed.
    """
    if is_late:
        return Outcome(kind="hang", text=output[-2000:])
    errors = [item for item in found if item is not None and "error" in item]
    if not errors and None not in found:
        if any(item is None or "error" in item for item in ddp):
            return Outcome(kind="wrong", text=f"trained, but DDP does not: {ddp}")
        return _compared(ddp, found, tolerance)
    wanted = [item["error"] for item in ddp if item is not None and "error" in item]
    if wanted and errors and errors[0]["error"] in wanted:
        return Outcome(kind="as ddp", text=errors[0]["error"])
    ours = [item for item in errors if item["is_ours"]]
    if not ours:
        text = errors[0]["traceback"] if errors else output
        return Outcome(kind="crash", text=text[-2500:])
    if len(ours) == len(found) and not any(item["has_begun"] for item in ours):
        return Outcome(kind="refused", text=ours[0]["error"])
    return Outcome(kind="stopped", text=ours[0]["error"])


def _compared(ddp: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], tolerance: float) -> Outcome:
    worst, where = 0.0, ""
    for rank, (wanted, given) in enumerate(zip(ddp, found, strict=True)):
        for name in wanted.keys() - {"whole"}:
            difference = _difference(wanted[name], given.get(name))
            if name == "metrics" and difference < _SINGLE:
                continue
            if difference > worst:
                worst, where = difference, f"{name} on rank {rank} differ by {difference:.3g}"
    return Outcome(kind="equal" if worst <= tolerance else "wrong", text=where, whole=found[0]["whole"])


def _difference(wanted: Any, found: Any) -> float:
    """Largest difference of two nestings of numbers, relative to the largest; infinite if they differ in form."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping) or wanted.keys() != found.keys():
            return math.inf
        return max((_difference(wanted[name], found[name]) for name in wanted), default=0.0)
    if len(wanted) != len(found) if isinstance(wanted, list) else False:
        return math.inf
    pairs = list(zip(wanted, found, strict=True)) if isinstance(wanted, list) else [(wanted, found)]
    scale = max((abs(a) for a, _ in pairs if math.isfinite(a)), default=0.0)
    worst = 0.0
    for a, b in pairs:
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        worst = max(worst, abs(a - b) / max(scale, 1e-12)) if math.isfinite(b) and math.isfinite(a) else math.inf
    return worst
