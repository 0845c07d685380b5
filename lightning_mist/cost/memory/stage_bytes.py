"""What the memory of stages is made of, before anybody asks how many microbatches are in flight; also for plan files.

Array axes
    K  candidates
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, cycle
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import ArrayRecord, FloatArray, IntArray
from lightning_mist.cost.memory.moments import COUNTED, Moment, Moments, counts_of, in_flight
from lightning_mist.errors import PlanError

Bytes: TypeAlias = FloatArray | float
"""Bytes of each candidate, or of all alike."""

NeedTerms: TypeAlias = tuple[tuple[str, float], ...]
"""``(name, bytes)``: ``always.TERM`` of what is there all the time, ``update.WHAT.TERM`` of what comes after the
last backward, and the arrays of :class:`StageNeeds` by their names without
``_K``. What is nothing is left out."""

Updates: TypeAlias = tuple[tuple[str, Mapping[str, Bytes]], ...]
"""What comes after the last backward: name and bytes by term, without what is there all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """What the memory of candidates is made of. Bytes; every array has the axis ``K``.

    Attributes:
        reused_K: Gradients of parameters that several parts of the stage use.
        pending_K: Gradients of the last backward that are still being reduced in a forward, or a backward of inputs.
        saved_K: What one microbatch leaves behind between its forward and its backward, when its output has been sent.
        handed_K: Its output until then, as far as no backward of the stage needs it.
        entering_K: What is received per microbatch.
        leaving_K: The gradient of what is sent per microbatch.
        returned_K: The gradient of what is received per microbatch.
        first_backward_K: Working set of the backward that makes the gradients, these included.
        input_backward_K: Working set of a backward that makes input gradients only.
        waiting_K: What one microbatch leaves behind from its input gradients until its weight gradients.
        weight_backward_K: Working set of weight gradients: what they need, and the largest of them.
        together_K: Gradients that a backward which makes input gradients only makes all the same.
        host_state_K: Pinned host memory of what is offloaded of parameters, gradients and optimizer state.
        host_microbatch_K: The same of one microbatch's activations.
        update: What comes after the last backward.
    """

    always: Mapping[str, Bytes]
    gradients_K: FloatArray
    reused_K: FloatArray
    pending_K: FloatArray
    saved_K: FloatArray
    handed_K: FloatArray
    entering_K: FloatArray
    leaving_K: FloatArray
    returned_K: FloatArray
    forward_K: FloatArray
    first_backward_K: FloatArray
    backward_K: FloatArray
    input_backward_K: FloatArray
    waiting_K: FloatArray
    weight_backward_K: FloatArray
    together_K: FloatArray
    host_state_K: FloatArray
    host_microbatch_K: FloatArray
    update: Updates

    def take(self, index: IntArray | slice) -> "StageNeeds":
        """Those of the candidates at some indices."""

        def taken(terms: Mapping[str, Bytes]) -> dict[str, Bytes]:
            # Bytes of all alike are numbers.
            return {name: value[index] if isinstance(value, np.ndarray) else value for name, value in terms.items()}

        return StageNeeds(
            always=taken(self.always),
            update=tuple((name, taken(terms)) for name, terms in self.update),
            **{name: getattr(self, name)[index] for name in _ARRAYS},
        )

    def peaks(self, moments: Moments) -> FloatArray:
        """Peak bytes over all moments of a batch."""
        return PeakParts.of(self).peaks(moments)

    def host_bytes(self, moments: Moments, chunk: int = 0) -> FloatArray:
        """Pinned host memory of a device, for one of the stages that it runs."""
        return self.host_state_K + in_flight(moments, chunk) * self.host_microbatch_K


def most_of(update: Updates) -> Bytes:
    """The most bytes that come after the last backward."""
    most: Bytes = 0.0
    for _, terms in update:
        most = np.maximum(most, sum(terms.values()))
    return most


_ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))
_DEVICE_ARRAYS = tuple(name for name in _ARRAYS if name.removesuffix("_K") in COUNTED)


def parts_of(chunks: Sequence[StageNeeds]) -> FloatArray:
    """One of everything that moments count, of chunk after chunk; axes thing and ``K``."""
    # Stages behind make their gradients first: as long as a stage is the last to have made some, these may be theirs.
    most = reversed([*accumulate((needs.pending_K for needs in reversed(chunks)), np.maximum)])
    of_each = (
        {name: getattr(needs, f"{name}_K", most_K) for name in COUNTED}
        for needs, most_K in zip(chunks, most, strict=True)
    )
    return np.stack([*chain.from_iterable(parts.values() for parts in of_each)])


def terms_at(moment: Moment, parts_K: FloatArray) -> dict[str, Bytes]:
    """What changes over a batch at a moment, by term."""
    found: dict[str, Bytes] = {}
    for number, part_K, term in zip(moment.counts, parts_K, cycle(COUNTED.values()), strict=False):
        if number:
            found[term] = found.get(term, 0.0) + number * part_K
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts(ArrayRecord):
    """All of many candidates' needs that their peaks depend on, as few arrays, whatever slots they are of.

    Attributes:
        parts_K: What moments count.
        update_K: The most that comes after the last backward.
    """

    parts_K: FloatArray
    update_K: FloatArray
    always_K: FloatArray

    @classmethod
    def of(cls, needs: StageNeeds) -> "PeakParts":
        """Those of the needs of one slot."""
        return cls.of_chunks([needs], needs.always, needs.update)

    @classmethod
    def of_chunks(cls, chunks: Sequence[StageNeeds], always: Mapping[str, Bytes], update: Updates) -> "PeakParts":
        """Those of devices that run several stages, with what these have and do together."""
        none_K = np.zeros(len(chunks[0].gradients_K))
        return cls(parts_K=parts_of(chunks), update_K=none_K + most_of(update), always_K=none_K + sum(always.values()))

    @classmethod
    def none(cls) -> "PeakParts":
        """Those of no candidates."""
        return cls(parts_K=np.empty((len(COUNTED), 0)), update_K=np.empty(0), always_K=np.empty(0))

    def peaks(self, moments: Moments) -> FloatArray:
        """Peak bytes over all moments of a batch."""
        peak_K: FloatArray = np.maximum(self.update_K, (counts_of(moments) @ self.parts_K).max(axis=0))
        return peak_K + self.always_K


def need_terms(needs: StageNeeds, always: Mapping[str, Bytes] | None = None) -> NeedTerms:
    """What the memory of one candidate is made of.

    Args:
        always: What is there all the time by term, if that is not what ``needs`` say: devices that run several stages
            hold it for all of them.
    """
    found = {f"always.{name}": value for name, value in (needs.always if always is None else always).items()}
    found |= {name.removesuffix("_K"): getattr(needs, name) for name in _DEVICE_ARRAYS}
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
        elif f"{name}_K" in _DEVICE_ARRAYS:
            arrays[f"{name}_K"] = value
        else:
            known = ", ".join(item.removesuffix("_K") for item in _DEVICE_ARRAYS)
            raise PlanError(f"needs.{name}: not known; known are always.TERM, update.WHAT.TERM, {known}")
    return StageNeeds(
        always=always,
        update=tuple(update.items()),
        **{name: np.array([value]) for name, value in arrays.items()},
    )
