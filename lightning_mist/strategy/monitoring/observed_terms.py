"""What the measured seconds of a run's stages say of the terms that its plan was predicted by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, pstdev

from lightning_mist.hardware import Correction, Observation, Term, factor_of
from lightning_mist.plan import Plan
from lightning_mist.strategy.monitoring.stage_times import Measured

_DEVIATION = 1.4826 * 1.2533
"""From a median absolute deviation to the standard deviation of a normal distribution, and from that to the standard
error of a median of many samples, which is ``sqrt(pi / 2)`` times that of their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    plan: Plan
    corrections: Sequence[Correction]
    has_overheads: bool

    def raw(self, index: int, name: str, term: Term) -> float:
        """An uncorrected term of a stage."""
        assert self.plan.predicted is not None
        terms = dict(self.plan.predicted.stages[index].breakdown)
        return terms.get(f"{name}_seconds", 0.0) / factor_of(self.corrections, term)

    def shared(self, index: int, *names: str) -> float:
        """Uncorrected terms of what a stage's ranks exchange."""
        return sum(self.raw(index, name, "communication") for name in names)

    def overhead(self, index: int, name: str) -> float:
        """An uncorrected term of the runtime's own Python."""
        return self.raw(index, name, "overhead") if self.has_overheads else 0.0


_Terms = dict[Term, float]


def observe(
    plan: Plan,
    measured: Sequence[Measured | None],
    *,
    corrections: Sequence[Correction],
    is_plain: bool,
    knows_layers: bool,
) -> tuple[Observation, ...]:
    """What a run observed, over all its stages: forwards, backwards, reduction of gradients, and updates.

    A single backward and the reduction beside it are not told apart. Waiting is not observed: it follows from the
    others.

    Args:
        corrections: Those that the prediction was made with; its terms are divided by them.
        is_plain: Whether the plan runs without the runtime.
        knows_layers: Whether computation was predicted from measured layers; if not, nothing is learned of it.
    """
    times = [item for item in measured if item is not None]
    if plan.predicted is None or len(times) < plan.num_stages:
        return ()
    prediction = _Prediction(plan=plan, corrections=corrections, has_overheads=not is_plain)
    found = []
    for expected, names in _kinds(plan, knows_layers):
        groups = [plan.chunks(group) for group in range(plan.num_groups)]
        pairs = [_pair([(expected(prediction, index), times[index]) for index in group], names) for group in groups]
        found.append(_over_groups(pairs))
    if not is_plain:
        # The least of all: a group may also have waited where nobody saw it.
        least = min(range(plan.num_groups), key=lambda index: times[index].times.other_seconds)
        terms: _Terms = {"overhead": prediction.overhead(least, "once")}
        found.append(_over_groups([_pair([(terms, times[least])], ("other_seconds",))]))
    return tuple(item for item in found if sum(seconds for _, seconds in item.expected) > 0 and item.seconds > 0)


_Kind = tuple[Callable[[_Prediction, int], _Terms], tuple[str, ...]]


def _kinds(plan: Plan, knows_layers: bool) -> list[_Kind]:
    """What is observed, and from which of the measured seconds."""
    has_peers = any(stage.mesh.num_peers > 1 for stage in plan.stages)
    # Without peers reducing is scaling, which predictions count as part of the update.
    update: _Kind = (_update, ("optimizer_seconds",) if has_peers else ("optimizer_seconds", "reduction_seconds"))
    forward: _Kind = (_forward, ("forward_seconds",))
    backward: _Kind = (_backward, ("backward_seconds",))
    if not knows_layers:
        return [update]
    if not has_peers:
        return [update, forward, backward]
    if plan.num_microbatches > 1:
        return [update, forward, backward, (_reduction, ("reduction_seconds",))]
    return [update, forward, (_backward_and_reduction, ("backward_seconds", "reduction_seconds"))]


def _forward(prediction: _Prediction, index: int) -> _Terms:
    count = prediction.plan.num_microbatches
    return {
        "forward": count * prediction.raw(index, "forward", "forward"),
        "communication": count * (prediction.shared(index, "unshard") / 2 + prediction.shared(index, "forward_ring")),
        "overhead": count * prediction.overhead(index, "forward_overhead"),
    }


def _backward(prediction: _Prediction, index: int) -> _Terms:
    count = prediction.plan.num_microbatches
    ring = prediction.shared(index, "ring") - prediction.shared(index, "forward_ring")
    every = prediction.shared(index, "unshard") / 2 + prediction.shared(index, "scatter") + ring
    overhead = prediction.overhead(index, "overhead") - prediction.overhead(index, "forward_overhead")
    backward, first = (prediction.raw(index, name, "backward") for name in ("backward", "accumulate"))
    return {
        "backward": count * backward - first,
        "forward": count * prediction.raw(index, "recompute", "forward"),
        "communication": count * every,
        "overhead": count * overhead,
    }


def _reduction(prediction: _Prediction, index: int) -> _Terms:
    return {"communication": prediction.shared(index, "reduce", "tied")}


def _backward_and_reduction(prediction: _Prediction, index: int) -> _Terms:
    terms = _backward(prediction, index)
    return terms | {"communication": terms["communication"] + _reduction(prediction, index)["communication"]}


def _update(prediction: _Prediction, index: int) -> _Terms:
    return {"update": prediction.raw(index, "update", "update"), "communication": prediction.shared(index, "gather")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Expected terms of a group of devices, what it measured, and the standard error of that."""

    expected: _Terms
    seconds: float
    error: float


def _pair(stages: Sequence[tuple[_Terms, Measured]], names: Sequence[str]) -> _Pair:
    """What the chunks of a group expected and measured together."""
    expected: _Terms = {}
    for terms, _ in stages:
        for term, seconds in terms.items():
            expected[term] = expected.get(term, 0.0) + seconds
    errors = [_DEVIATION * getattr(item.spread, name) / sqrt(item.steps) for _, item in stages for name in names]
    return _Pair(
        expected=expected,
        seconds=sum(getattr(item.times, name) for _, item in stages for name in names),
        error=sqrt(sum(error**2 for error in errors)),
    )


def _over_groups(pairs: Sequence[_Pair]) -> Observation:
    """All groups as one observation: they are on one machine, so their errors are not independent.

    Its spread is that of the measurements and of what the groups disagree in.
    """
    total: _Terms = {}
    for pair in pairs:
        for term, seconds in pair.expected.items():
            total[term] = total.get(term, 0.0) + seconds
    measured = sum(pair.seconds for pair in pairs)
    ratios = [pair.seconds / whole for pair in pairs if (whole := sum(pair.expected.values())) > 0]
    disagreement = pstdev(ratios) / mean(ratios) / sqrt(len(ratios)) if ratios and mean(ratios) > 0 else 0.0
    error = sqrt(sum(pair.error**2 for pair in pairs)) / measured if measured > 0 else 0.0
    return Observation(expected=tuple(total.items()), seconds=measured, spread=sqrt(error**2 + disagreement**2))
