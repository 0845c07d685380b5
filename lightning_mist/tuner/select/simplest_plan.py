"""Which of plans that cannot be told apart is simpler.

A plan is simpler than another

1. if it uses fewer techniques, each of which is one more thing that takes part in every step and has to work: a kind of
   state in host memory, a kind of state that data-parallel ranks share out (a ZeRO stage is as many of these as its
   number), doing so within groups, tensor, sequence or context parallelism, recomputation, a schedule with chunks or
   split backwards;
2. of as many techniques, if its stages have fewer different shapes;
3. of as many shapes, if it has fewer stages.

A plan under another schedule keeps what the pipeline saves that it was made from, which was the best under the
search's own schedule and by the closed form. Where the other schedule needs less, savings are left over: kinds of state
that some stage offloads or shares out. Of these it is relieved as far as it fits and takes as long on the clock.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, predict_with, seconds_with
from lightning_mist.cost.interleaved_memory import plans_peaks
from lightning_mist.plan import Plan
from lightning_mist.plan.changes import OFFLOADS, ZERO, anywhere, burdens
from lightning_mist.tuner.options import OPTIONS

ALIKE = OPTIONS.alike
"""A share of the seconds of a step by which plans cannot be told apart."""

Fits: TypeAlias = Callable[[Plan], bool]
"""Whether a plan fits."""

Simplicity: TypeAlias = tuple[int, int, int]
"""Numbers of techniques, of shapes of stages, and of stages: the lesser, the simpler."""


def shapes(plan: Plan) -> int:
    """How many different stages a plan has: by layers, arrangement of devices, rows and savings."""
    return len(set(map(anywhere, plan.stages)))


def simplicity(plan: Plan) -> Simplicity:
    """How simple a plan is, see :data:`Simplicity`."""
    return len(burdens(plan)), shapes(plan), plan.num_stages


def simplest(plans: Iterable[tuple[Plan, float]]) -> Plan:
    """The simplest of the plans that cannot be told apart from the fastest; of equally simple ones the fastest.

    Args:
        plans: Plans and their seconds on the clock, at least one.
    """
    found = list(plans)
    most = min(seconds for _, seconds in found) * (1 + OPTIONS.alike)
    near = [(plan, seconds) for plan, seconds in found if seconds <= most]
    return min(near, key=lambda item: (simplicity(item[0]), item[1]))[0]


def why_simpler(plan: Plan, other: Plan) -> str:
    """What makes a plan simpler than another, in words: the first thing that counts."""
    own, others = burdens(plan), burdens(other)
    if len(own) < len(others):
        without = " and ".join(name for name in others if name not in own)
        return f"it does without {without}"
    if shapes(plan) < shapes(other):
        return f"it has {_count(shapes(plan), 'kind')} of stages in place of {shapes(other)}"
    return f"it has {_count(plan.num_stages, 'stage')} in place of {other.num_stages}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def drop_savings(model: CostModel, plan: Plan, fits: Fits, zero_stages: Sequence[int]) -> Plan:
    """The plan with as few kinds of state offloaded or shared out as fit and take as long on the clock.

    Args:
        plan: The plan, with its prediction, as the result has its own.
        zero_stages: ZeRO stages that plans may use.
    """
    assert plan.predicted is not None
    most, best = plan.predicted.step_seconds * (1 + OPTIONS.alike), plan
    while True:
        count = len(burdens(best))
        less = (item for item in _with_less(best, zero_stages) if len(burdens(item)) < count)
        found = next((item for item in less if fits(item) and seconds_with(model, item) <= most), None)
        if found is None:
            return best if best is plan else replace(best, predicted=predict_with(model, best))
        best = found


def fits_within(
    model: CostModel, limits: Callable[[Plan], Sequence[float]], host_limits: Callable[[Plan], Sequence[float]]
) -> Fits:
    """Says of plans whether they fit.

    Args:
        limits: Bytes that the devices of every stage of a plan may use.
        host_limits: Bytes of host memory that each of them may use.
    """

    def fits(plan: Plan) -> bool:
        layers_SM = np.array([[stage.checkpointing.layers] for stage in plan.stages])
        (peaks,) = plans_peaks(model.memory, [(plan, layers_SM)])
        on_device = bool(np.all(peaks.device_SW[:, 0] <= np.array(limits(plan))))
        return on_device and bool(np.all(peaks.host_SW[:, 0] <= np.array(host_limits(plan))))

    return fits


def _with_less(plan: Plan, zero_stages: Sequence[int]) -> Iterator[Plan]:
    """Plans that offload one kind of state less, then those that share out less."""
    for saving in OFFLOADS.values():
        yield saving.at_most(plan, 0.0)
    for most in sorted(zero_stages):
        less = ZERO.at_most(plan, most)
        if all(item.zero_stage in zero_stages for item in less.stages):
            yield less
