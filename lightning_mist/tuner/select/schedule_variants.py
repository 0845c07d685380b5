"""Plans under other schedules, made from the pipelines near the best.

The search itself is exact for 1F1B (and GPipe), whose step has a closed form. Interleaved 1F1B and ZB-H1 have none that
a dynamic program could build up, so they are tried on every pipeline that is near the best by that form:

* interleaved 1F1B deals the layers of every stage out to ``V`` chunks; the devices of a stage keep as many layers as
  they had, of other positions;
* ZB-H1 keeps the stages as they are.

Where layers or recomputation are settled (but for all layers) there are no chunks, which would begin elsewhere. Each is
predicted exactly, by its own lists of actions. If it does not fit, every group of devices recomputes one more layer,
until it does. What comes out is never slower than what went in, and nothing is proven about other pipelines.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from lightning_mist.cost import CostModel, least_seconds, predict_with, seconds_with
from lightning_mist.cost.inputs import BoolArray, IntArray
from lightning_mist.cost.interleaved_memory import PlanPeaks, plans_peaks, stage_peaks
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan import Plan, ScheduleName, ZeroStage
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.search import Stages
from lightning_mist.tuner.space import Space

Limits: TypeAlias = Callable[[Plan], Sequence[float]]
"""Bytes that every stage of a plan may use of something, each of its devices."""


class PlanRoom(NamedTuple):
    """What plans cost, where they are searched for, and what they have to fit in.

    Attributes:
        limits: Bytes that the devices of every stage of a plan may use.
        host_limits: Bytes of host memory that each of them may use.
    """

    model: CostModel
    space: Space
    limits: Limits
    host_limits: Limits

    @classmethod
    def of(cls, stages: Stages | IntraStage) -> "PlanRoom":
        """That of stages."""
        return cls(stages.model, stages.space, stages.limits, stages.host_limits)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits as it is."""
        layers_SK = np.array([[stage.checkpointing.layers] for stage in plan.stages])
        (peaks,) = plans_peaks(self.model.memory, [(plan, layers_SK)])
        return bool(self.holds(plan, peaks)[0])

    def holds(self, plan: Plan, peaks: PlanPeaks) -> BoolArray:
        """Which versions of a plan fit by their peaks."""
        fits_K: BoolArray = np.all(peaks.device_SK <= np.array(self.limits(plan))[:, None], axis=0)
        fits_K &= np.all(peaks.host_SK <= np.array(self.host_limits(plan))[:, None], axis=0)
        return fits_K


def best_variant(
    room: PlanRoom, plans: Iterable[Plan], *, below: float = np.inf, most: int | None = None
) -> Plan | None:
    """The fastest plan that fits under a schedule other than that of the search, with its prediction.

    Args:
        room: Of its search space the schedules count.
        plans: Pipelines under the schedule of the search.
        below: Plans that do not take fewer seconds are of no interest.
        most: How many are run on the clock, the best by a bound of their seconds; by default all.
    """
    candidates = [candidate for plan in plans for candidate in _variants(plan, room.space)]
    floors = zip(least_seconds(room.model, candidates), candidates, strict=True)
    tried = sorted(((floor, item) for floor, item in floors if floor < below), key=lambda item: item[0])[:most]
    may_fit = _may_fit(room, [candidate for _, candidate in tried])
    # Best first: each is clocked as it is, then made to fit, then clocked again, as long as it may be the fastest.
    waiting = [
        (floor, place, _Known.FLOOR, candidate)
        for place, ((floor, candidate), may) in enumerate(zip(tried, may_fit, strict=True))
        if may
    ]
    while waiting:
        seconds, place, known, plan = heapq.heappop(waiting)
        if seconds >= below:
            break
        if known is _Known.FITS:
            return clocked(room.model, plan)
        if known is _Known.CLOCKED:
            found = next(iter(fitted(room, [plan])))
            if found is plan:
                heapq.heappush(waiting, (seconds, place, _Known.FITS, plan))
            elif found is not None:
                # What recomputes more takes no less.
                floor = max(seconds, least_seconds(room.model, [found])[0])
                heapq.heappush(waiting, (floor, place, _Known.FITS_FLOOR, found))
            continue
        then = _Known.CLOCKED if known is _Known.FLOOR else _Known.FITS
        heapq.heappush(waiting, (seconds_with(room.model, plan), place, then, plan))
    return None


def clocked(model: CostModel, plan: Plan) -> Plan:
    """A plan with its prediction."""
    return replace(plan, predicted=predict_with(model, plan))


class _Known(IntEnum):
    """What is known of a candidate: a floor of its seconds, these, and whether it fits."""

    FLOOR = 0
    CLOCKED = 1
    FITS_FLOOR = 2
    FITS = 3


def has_chunks(space: Space) -> bool:
    """Whether stages may be dealt out in chunks.

    Chunks begin at layers where no stage did, and share out what is recomputed, so that neither may be settled, unless
    all layers are recomputed.
    """
    search = space.search
    is_settled = search.layer_cuts is not None or search.checkpointed_shares not in (None, (1.0,))
    return "interleaved-1f1b" in search.schedules and not is_settled


def refuse_without_variant(schedules: Sequence[ScheduleName]) -> NoReturn:
    """Say that nothing fits under the schedules asked for.

    Raises:
        InfeasibleError: Always.
    """
    raise InfeasibleError(
        f"no plan fits under schedules={list(schedules)}: these are tried on the pipelines that the search finds for "
        "1f1b, and none of those can be run so (interleaved-1f1b needs at least 2 stages of 2 layers and a number of "
        "microbatches that is a multiple of the stages, and neither layer_cuts nor checkpointed_shares; both keep more "
        "in memory). Add '1f1b' to schedules"
    )


def _variants(plan: Plan, space: Space) -> Iterator[Plan]:
    if "zb-h1" in space.search.schedules and all(stage.zero_stage < ZeroStage.GRADIENTS for stage in plan.stages):
        yield replace(plan, schedule="zb-h1", predicted=None)
    if has_chunks(space):
        yield from _interleaved(plan, space.search.chunks)


def _interleaved(plan: Plan, numbers: Sequence[int]) -> Iterator[Plan]:
    """The same devices with several chunks each."""
    groups = plan.num_stages
    if groups < 2 or plan.num_microbatches % groups:
        return
    for chunks in (count for count in numbers if count <= min(stage.num_layers for stage in plan.stages)):
        layers = [parts(stage.num_layers, chunks) for stage in plan.stages]
        recomputed = [parts(stage.checkpointing.layers, chunks) for stage in plan.stages]
        stages, first = [], 0
        for chunk in range(chunks):
            for group, stage in enumerate(plan.stages):
                end = first + layers[group][chunk]
                count = min(recomputed[group][chunk], layers[group][chunk])
                stages.append(stage.part(first, end, count))
                first = end
        yield replace(plan, schedule="interleaved-1f1b", stages=tuple(stages), predicted=None)


def parts(count: int, chunks: int) -> list[int]:
    """A number of layers in parts that differ by at most one."""
    return [count * (chunk + 1) // chunks - count * chunk // chunks for chunk in range(chunks)]


def _may_fit(room: PlanRoom, plans: Sequence[Plan]) -> list[bool]:
    """Whether the last stage of each may fit under ZB-H1, which keeps most there beyond what 1F1B does."""
    asked = []
    for plan in (plan for plan in plans if plan.schedule == "zb-h1"):
        stage = plan.stages[-1]
        most = stage.checkpointing.layers + _most_more(room.space, plan)
        asked.append((plan, np.array([stage.checkpointing.layers, min(stage.num_layers, most)])))
    peaks = iter(stage_peaks(room.model.memory, asked, -1))
    return [plan.schedule != "zb-h1" or bool(next(peaks).min() <= room.limits(plan)[-1]) for plan in plans]


def _most_more(space: Space, plan: Plan) -> int:
    """By how many layers the recomputation of each group of devices may be raised."""
    may_recompute = space.checkpointing and space.search.checkpointed_shares is None
    return max(sum(layers) - sum(recomputed) for layers, recomputed in _groups(plan)) if may_recompute else 0


def fitted(room: PlanRoom, plans: Sequence[Plan]) -> Iterator[Plan | None]:
    """Each plan with as few more recomputed layers on every group of devices as make it fit; nothing if none do."""
    asked = [(plan, _recomputed(_groups(plan), _most_more(room.space, plan))) for plan in plans]
    for plan, found in zip(plans, plans_peaks(room.model.memory, asked), strict=True):
        fits_K = room.holds(plan, found)
        yield _recomputing(plan, int(fits_K.argmax())) if fits_K[0] or fits_K[-1] else None


def first_stages(room: PlanRoom, plans: Sequence[Plan]) -> Iterator[int | None]:
    """How many more layers :func:`fitted` recomputes of each plan at least, by its first stage alone; fast."""
    asked = [(plan, _recomputed(_groups(plan), _most_more(room.space, plan))[0]) for plan in plans]
    for plan, peak_K in zip(plans, stage_peaks(room.model.memory, asked, 0), strict=True):
        fits_K = peak_K <= room.limits(plan)[0]
        yield int(fits_K.argmax()) if fits_K[0] or fits_K[-1] else None


_Groups: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Layers of the chunks of every group of devices, and how many of each are recomputed."""


def _groups(plan: Plan) -> _Groups:
    chunks = [[plan.stages[index] for index in plan.chunks(group)] for group in range(plan.num_groups)]
    return tuple(
        (tuple(stage.num_layers for stage in stages), tuple(stage.checkpointing.layers for stage in stages))
        for stages in chunks
    )


@lru_cache(maxsize=64)
def _recomputed(groups: _Groups, most: int) -> IntArray:
    """Recomputed layers of every stage, with so many more of each group of devices; axes stage, and how many more."""
    found_SK = np.zeros((sum(len(layers) for layers, _ in groups), most + 1), dtype=np.int64)
    for group, (layers, recomputed) in enumerate(groups):
        for more in range(most + 1):
            shared = parts(min(sum(layers), sum(recomputed) + more), len(layers))
            found_SK[group :: len(groups), more] = np.minimum(layers, shared)
    found_SK.setflags(write=False)
    return found_SK


def _recomputing(plan: Plan, more: int) -> Plan:
    if not more:
        return plan
    counts = zip(plan.stages, _recomputed(_groups(plan), more)[:, more].tolist(), strict=True)
    stages = tuple(replace(stage, **stage.method.settings(count)) for stage, count in counts)
    return replace(plan, stages=stages)
