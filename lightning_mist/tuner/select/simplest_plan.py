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

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from lightning_mist.cost import seconds_with
from lightning_mist.plan import Plan
from lightning_mist.plan.changes import OFFLOADS, ZERO, anywhere, burdens
from lightning_mist.plan.plan_tables import counted
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.select.schedule_variants import PlanRoom, clocked

ALIKE = OPTIONS.alike
"""A share of the seconds of a step by which plans cannot be told apart."""

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
        return f"it has {counted(shapes(plan), 'kind')} of stages in place of {shapes(other)}"
    return f"it has {counted(plan.num_stages, 'stage')} in place of {other.num_stages}"


def drop_savings(room: PlanRoom, plan: Plan) -> Plan:
    """A predicted plan with as few kinds of state offloaded or shared out as fit and take as long on the clock."""
    most, best = plan.prediction.step_seconds * (1 + OPTIONS.alike), plan
    while True:
        count = len(burdens(best))
        less = (item for item in _with_less(best, room.space.search.zero_stages) if len(burdens(item)) < count)
        found = next((item for item in less if room.fits(item) and seconds_with(room.model, item) <= most), None)
        if found is None:
            return best if best is plan else clocked(room.model, best)
        best = found


def _with_less(plan: Plan, zero_stages: Sequence[int]) -> Iterator[Plan]:
    """Plans that offload one kind of state less, then those that share out less."""
    for saving in OFFLOADS.values():
        yield saving.at_most(plan, 0.0)
    for most in sorted(zero_stages):
        less = ZERO.at_most(plan, most)
        if all(item.zero_stage in zero_stages for item in less.stages):
            yield less
