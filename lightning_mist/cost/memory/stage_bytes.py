"""What the memory of stages is made of, before anybody asks how many microbatches are in flight; also for plan files.

Array axes
    K  candidates
    F  factors: how often a situation counts what there is of each kind
    X  situations
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import ArrayRecord, FloatArray, IntArray
from lightning_mist.cost.memory.phases import Phase, PhaseKind
from lightning_mist.errors import PlanError

Bytes: TypeAlias = FloatArray | float
"""Bytes of each candidate, or of all alike."""

NeedTerms: TypeAlias = tuple[tuple[str, float], ...]
"""``(name, bytes)``: ``always.TERM`` of what is there all the time, ``update.SITUATION.TERM`` of what comes after the
last backward, and the arrays of :class:`StageNeeds` by their names without
``_K``. What is nothing is left out."""

ROUNDING = 1.0
"""Bytes by which sums of the same terms in another order may differ, at most."""


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
        update: The situations after the last backward: name and bytes by term, without ``always``.
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
    update: tuple[tuple[str, Mapping[str, Bytes]], ...]

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

    def situations(self, phases: Iterable[Phase]) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Every situation with its bytes by term, ``always`` included."""
        found: list[tuple[str, Mapping[str, Bytes]]] = [(phase.kind, self.around(phase)) for phase in phases]
        return [(name, {**self.always, **terms}) for name, terms in (*found, *self.update)]

    def nearest(self, phases: Sequence[Phase]) -> list[tuple[str, Mapping[str, Bytes]]]:
        """Of all situations, as of :meth:`situations`, those that may be the peak of some candidate."""
        parts = PeakParts.of(self)
        total_XK = np.empty((len(phases) + len(self.update), len(parts)))
        for kind, at, factors in _counted(tuple(phases)):
            total_XK[at, :] = factors @ parts.parts_FK + parts.working(kind)
        for index, (_, terms) in enumerate(self.update, len(phases)):
            total_XK[index] = sum(terms.values())
        near_X = (total_XK >= total_XK.max(axis=0) - ROUNDING).any(axis=1).tolist()
        update = tuple(item for item, is_near in zip(self.update, near_X[len(phases) :], strict=True) if is_near)
        return replace(self, update=update).situations(
            phase for phase, is_near in zip(phases, near_X[: len(phases)], strict=True) if is_near
        )

    def peaks(self, phases: Sequence[Phase]) -> FloatArray:
        """Peak bytes over all situations."""
        return PeakParts.of(self).peaks(phases)

    def without(self, *names: str) -> "StageNeeds":
        """All but some terms of what is always there."""
        return replace(self, always={name: value for name, value in self.always.items() if name not in names})

    def working(self, kind: PhaseKind) -> FloatArray:
        """The working set of what is computed."""
        if kind == "transfer":
            return np.zeros(len(self.gradients_K))
        if kind == "backward":
            return self.backward_K + self.reused_K
        found: FloatArray = getattr(self, f"{kind.replace(' ', '_')}_K")
        return found

    def around(self, phase: Phase) -> dict[str, Bytes]:
        """What changes over a batch, by term."""
        gradients, pending, others, waiting, received, ahead, sent, handed, together = _factors(phase)
        gradients_K: Bytes = self.gradients_K * gradients + self.pending_K * pending + self.together_K * together
        working_K = self.working(phase.kind)
        if phase.kind == "backward":
            # A parameter that two parts use gets its two contributions summed before they are accumulated.
            gradients_K, working_K = gradients_K + self.reused_K, self.backward_K
        return {
            "gradient_bytes": gradients_K,
            "activation_bytes": others * self.saved_K + waiting * self.waiting_K,
            "transfer_bytes": received * self.entering_K
            + ahead * self.leaving_K
            + sent * self.returned_K
            + handed * self.handed_K,
            "working_bytes": working_K,
        }


_ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts(ArrayRecord):
    """All of many candidates' needs that their peaks depend on, as few arrays, whatever slots they are of.

    Attributes:
        parts_FK: What situations count as often as :func:`_factors` say.
    """

    parts_FK: FloatArray
    working_WK: FloatArray
    update_K: FloatArray
    always_K: FloatArray

    @classmethod
    def of(cls, needs: StageNeeds) -> "PeakParts":
        """Those of the needs of one slot."""
        none_K = np.zeros(len(needs.gradients_K))
        parts = (
            needs.gradients_K,
            needs.pending_K,
            needs.saved_K,
            needs.waiting_K,
            needs.entering_K,
            needs.leaving_K,
            needs.returned_K,
            needs.handed_K,
            needs.together_K,
        )
        update_K = none_K
        for _, terms in needs.update:
            update_K = np.maximum(update_K, sum(terms.values()))
        return cls(
            parts_FK=np.stack(parts),
            working_WK=np.stack([needs.working(kind) for kind in _WORKING]),
            update_K=update_K,
            always_K=none_K + sum(needs.always.values()),
        )

    @classmethod
    def none(cls) -> "PeakParts":
        """Those of no candidates."""
        one_K = np.empty(0)
        return cls(parts_FK=np.empty((9, 0)), working_WK=np.empty((len(_WORKING), 0)), update_K=one_K, always_K=one_K)

    def beside(self, more: FloatArray | float) -> "PeakParts":
        """The same beside so many more bytes that are there all the time."""
        return replace(self, always_K=self.always_K + more)

    def peaks(self, phases: Sequence[Phase]) -> FloatArray:
        """Peak bytes over all situations."""
        # One matrix product instead of as many sums as there are situations.
        peak_K = self.update_K
        for kind, _, factors in _counted(tuple(phases)):
            peak_K = np.maximum(peak_K, self.working(kind) + (factors @ self.parts_FK).max(axis=0))
        return peak_K + self.always_K

    def working(self, kind: PhaseKind) -> FloatArray | float:
        """The working set of what is computed."""
        if kind == "transfer":
            return 0.0
        found: FloatArray = self.working_WK[_WORKING.index(kind)]
        return found


_WORKING: tuple[PhaseKind, ...] = ("forward", "first backward", "backward", "input backward", "weight backward")
"""Kinds of situations in which something is computed."""


@lru_cache(maxsize=4096)
def _counted(phases: tuple[Phase, ...]) -> tuple[tuple[PhaseKind, list[int], FloatArray], ...]:
    """Situations of one kind after another: which they are, and how often they count what; axes ``X`` and ``F``."""
    found = []
    for kind in dict.fromkeys(phase.kind for phase in phases):
        at = [index for index, phase in enumerate(phases) if phase.kind == kind]
        found.append((kind, at, np.array([_factors(phases[index]) for index in at])))
    return tuple(found)


def _factors(phase: Phase) -> tuple[float, ...]:
    """How often a situation counts gradients, pending ones, saved bytes, those kept for weights, and transfers."""
    # In an input gradient's computation the gradient at hand stands where the output was, which the saved bytes count.
    is_weights = phase.kind == "weight backward"
    consumes = phase.kind not in ("forward", "weight backward", "transfer") and phase.received_gradients > 0
    ahead = phase.received_gradients - consumes
    # Weight gradients are there when the first of them have been made.
    gradients = is_weights or phase.kind == "backward" or (phase.gradients and phase.kind != "first backward")
    pending = phase.gradients and phase.kind not in ("first backward", "backward")
    counts = (phase.others, phase.waiting, phase.received, ahead, phase.sent_gradients, phase.sent_activations)
    together = phase.kind == "input backward" and not phase.gradients
    return (float(gradients), float(pending), *counts, float(together))


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
