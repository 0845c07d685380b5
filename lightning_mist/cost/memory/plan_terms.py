"""What the memory of one stage is made of, as names and bytes that a plan file can hold."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.memory.stage_bytes import Bytes, StageNeeds
from lightning_mist.errors import PlanError

NeedTerms: TypeAlias = tuple[tuple[str, float], ...]
"""``(name, bytes)``: ``always.TERM`` of what is there all the time, ``update.SITUATION.TERM`` of what comes after the
last backward, and the arrays of :class:`~lightning_mist.cost.memory.stage_bytes.StageNeeds` by their names without
``_K``. What is nothing is left out."""

_ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))


def need_terms(needs: StageNeeds, always: Mapping[str, Bytes] | None = None) -> NeedTerms:
    """What the memory of one candidate is made of.

    Args:
        always: What is there all the time by term, if that is not what ``needs`` say: devices that run several stages
            hold it for all of them.
    """
    found = {f"always.{name}": value for name, value in (needs.always if always is None else always).items()}
    found |= {name.removesuffix("_K"): getattr(needs, name) for name in _ARRAYS}
    found |= {f"update.{what}.{name}": value for what, terms in needs.update for name, value in terms.items()}
    numbers = ((name, float(np.asarray(value).reshape(-1)[0])) for name, value in found.items())
    return tuple((name, number) for name, number in numbers if number)


def needs_of(terms: NeedTerms) -> StageNeeds:
    """Needs of one candidate from what :func:`need_terms` made of them.

    Raises:
        PlanError: If a name is not known.
    """
    always: dict[str, float] = {}
    update: dict[str, dict[str, float]] = {}
    arrays = dict.fromkeys(_ARRAYS, 0.0)
    for name, value in terms:
        first, _, rest = name.partition(".")
        if first == "always":
            always[rest] = value
        elif first == "update":
            what, _, term = rest.rpartition(".")
            update.setdefault(what, {})[term] = value
        elif f"{name}_K" in arrays:
            arrays[f"{name}_K"] = value
        else:
            known = ", ".join(item.removesuffix("_K") for item in _ARRAYS)
            raise PlanError(f"needs.{name}: not known; known are always.TERM, update.SITUATION.TERM, {known}")
    return StageNeeds(
        always=always,
        update=tuple(update.items()),
        **{name: np.array([value]) for name, value in arrays.items()},
    )
