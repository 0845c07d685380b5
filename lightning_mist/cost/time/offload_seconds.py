"""Seconds of stages that keep a part of their state in host memory.

What is where is said in :mod:`lightning_mist.cost.memory.offload_bytes`; here is when it is copied. A stage goes
through its units (head, layers, tail), and beside each of them its four channels are busy with what the unit needs and
with what its neighbours do: the rows of :mod:`lightning_mist.schedule.stage_program`, which
:mod:`lightning_mist.cost.time.pass_seconds` adds up. What copies take is what passes with them take more than passes
without.

Under ZeRO-3 the rank that has parameters gives them out when they have arrived, and computes nothing until then: they
are fetched beside nothing. Gradients that the first microbatch makes are fetched like those of others, which is at most
too much by one fetch per batch; with one microbatch there is nothing to fetch.

If parameters, gradients or optimizer state are offloaded, the update of a batch happens unit by unit in the first
forward of the next. No more is on the device then than in a backward at the same unit: activations of the units before
it, gradients of those behind it. Up to the update of the second unit all is issued before the first one needs its
input, and counts with the update; for the rest stages behind wait. Where code of the user's may look at gradients or
state, the update is behind the last backward, and the next batch begins with fetching parameters.

That lists of actions take as long ``benchmarks.planner.copies_clock`` shows, whose copies are the runtime's.

Array axes
    K  candidates
"""

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from lightning_mist.cost.inputs import ArrayRecord, FloatArray, OffloadCandidates, StageRegions
from lightning_mist.cost.time.offload_loads import CopyStages, loads_of, ratios_of
from lightning_mist.cost.time.overlap import CopyRates
from lightning_mist.cost.time.pass_seconds import Passes, PassKind
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import ends_together, speed_table
from lightning_mist.plan import OffloadRatios
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_program import Channel

AT_ONCE = 1 << 14
"""Stages that are asked about together: enough to be fast, and few enough to take little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySeconds(ArrayRecord):
    """What host copies do to the seconds of stages; nothing for candidates that offload nothing.

    Attributes:
        copies_K: What they add to a middle microbatch.
        forward_copies_K: The part of it that belongs to the forward.
        update_copies_K: What they add to the update.
        gather_K: Giving out updated parameters, where that happens in the first forward as far as it does not hide.
        reduce_K: What averaging gradients takes more (or less) because copies run beside the last backward too.
        deferred_K: What of the update, its copies and ``gather_K`` the first forward does once it has its input.
    """

    copies_K: FloatArray
    forward_copies_K: FloatArray
    update_copies_K: FloatArray
    gather_K: FloatArray
    reduce_K: FloatArray
    deferred_K: FloatArray


def copy_seconds(stages: CopyStages, rates: CopyRates, interference: Interference | None) -> CopySeconds:
    """Seconds of host copies of stages that have ratios.

    Args:
        interference: How channels slow each other down; ``None`` where they take turns.
    """
    offload, count = ratios_of(stages.candidates), len(stages.candidates)
    offloads_K = offload.is_updated_by_units_K | (offload.kept_ratios > 0).any(axis=1)
    across_K = np.array([place.across_nodes for place in stages.places])[stages.place_K]
    found = CopySeconds(**{name: np.zeros(count) for name in CopySeconds.__slots__})
    found.gather_K[:] = stages.gather_K
    for across in (False, True):
        at_J = np.flatnonzero(offloads_K & (across_K == across))
        for begin in range(0, len(at_J), AT_ONCE):
            some_J = at_J[begin : begin + AT_ONCE]
            terms = _copy_seconds(stages.take(some_J), rates, interference, across_nodes=across)
            for name in CopySeconds.__slots__:
                getattr(found, name)[some_J] = getattr(terms, name)
    return found


def _copy_seconds(
    stages: CopyStages, rates: CopyRates, interference: Interference | None, *, across_nodes: bool
) -> CopySeconds:
    """As :func:`copy_seconds` of stages each of which offloads something, all across nodes or none."""
    candidates, offload, is_deferred_K = stages.candidates, ratios_of(stages.candidates), stages.is_deferred_K
    loads, question_K = loads_of(stages, rates)

    regions = StageRegions.of(stages.places[0].memory.spec, candidates)
    passes = Passes(loads, question_K, regions, interference, across_nodes)
    forward, backward = PassKind(ActionKind.FORWARD), PassKind(ActionKind.BACKWARD)
    moving_forward, moving_backward = replace(forward, copies=True), replace(backward, copies=True)
    backward_K, moving_backward_K = passes.seconds(backward), passes.seconds(moving_backward)
    forward_copies_K = np.maximum(passes.seconds(moving_forward) - passes.seconds(forward), 0.0)
    # A batch begins with no unit there, whatever is copied.
    begun_K = passes.seconds(replace(forward, away=True))
    update_K, plain_K = stages.update_K * offload.is_updated_by_units_K, begun_K + forward_copies_K
    gather_K = np.maximum(passes.seconds(replace(forward, edge=True, away=True)) - begun_K - update_K, 0.0)
    whole_K, behind_K = passes.with_input(replace(moving_forward, edge=True, away=True))
    update_copies_K = whole_K - plain_K - (update_K + gather_K)
    is_eager_K = offload.is_updated_by_units_K & ~is_deferred_K
    if is_eager_K.any():
        eager_K = passes.seconds(PassKind(ActionKind.UPDATE, copies=True, edge=True)) - update_K
        update_copies_K = np.where(is_eager_K, eager_K, update_copies_K)
    reduce_K = passes.seconds(replace(moving_backward, edge=True)) - moving_backward_K
    return CopySeconds(
        copies_K=forward_copies_K + np.maximum(moving_backward_K - backward_K, 0.0),
        forward_copies_K=forward_copies_K,
        update_copies_K=np.maximum(update_copies_K, 0.0),
        gather_K=np.where(is_deferred_K, gather_K, stages.gather_K),
        reduce_K=reduce_K - (passes.seconds(replace(backward, edge=True)) - backward_K),
        deferred_K=np.maximum(behind_K - plain_K, 0.0) * is_deferred_K,
    )


# When each channel of a stage's devices is busy inside its passes, row by row.
#
# The seconds of a plan count what channels take beyond computing; here are the rows that they are made of, each with
# the time at which its channels are done: how many units have it, and of each its seconds, for how long from its
# beginning it communicates and copies to the device and to the host, and how long computing then waits for parameters
# that only their owner fetches (ZeRO-3). What hides behind nothing has rows of its own.
#
# Parameters of the two outermost units stay from one pass to the next in the middle of a batch, and are given out in
# its first forward: a middle microbatch is what is told.


ChannelRows = dict[str, tuple[float, ...]]
"""By what a pass is, its rows one after another, each behind the number of units that are alike."""


def channel_rows(stage: CopyStages, rates: CopyRates | None, interference: Interference) -> ChannelRows:
    """Rows of the passes of a single stage in which anything but computing happens.

    ``"forward"`` and ``"backward"`` of a middle microbatch; ``"first forward"`` of a batch, with the update of the
    batch before, or that ``"update"`` by itself; ``"last backward"``, beside which gradients are averaged.

    Args:
        stage: One place, with one candidate.
        rates: Of copies; ``None`` where nothing is offloaded.
    """
    if rates is None:
        nothing = OffloadCandidates.of(OffloadRatios())
        stage = replace(stage, candidates=replace(stage.candidates, offload=nothing))
    (place,) = stage.places
    loads, question_K = loads_of(stage, rates or CopyRates(to_device=np.inf, to_host=np.inf))
    if place.memory.holdings.is_one_unit:
        loads["unshard"][:] = 0.0  # nothing ever takes its place
    regions = StageRegions.of(place.memory.spec, stage.candidates)
    passes = Passes(loads, question_K, regions, interference, place.across_nodes)
    found = {"forward": _told(passes, ActionKind.FORWARD), "backward": _told(passes, ActionKind.BACKWARD)}
    if bool(stage.is_deferred_K[0]):
        found["first forward"] = _told(passes, ActionKind.FORWARD, edge=True)
    elif bool(ratios_of(stage.candidates).is_updated_by_units_K[0]):
        found["update"] = _told(passes, ActionKind.UPDATE, edge=True)
    if rates is not None and (last := _told(passes, ActionKind.BACKWARD, edge=True)) != found["backward"]:
        found["last backward"] = last
    return {name: rows for name, rows in found.items() if rows}


def _told(passes: Passes, kind: ActionKind, *, edge: bool = False) -> tuple[float, ...]:
    """The rows of one pass of a single candidate; none if it does nothing but compute."""
    one = PassKind(kind, copies=True, edge=edge, away=edge and kind is ActionKind.FORWARD)
    front, behind = passes.ends(one)
    # One question about one list: rows of the list are all that there are.
    loads_R, waited_R = (values[..., passes.lists.row_RJ[:, 0]] for values in passes.rows(one))
    order = slice(None, None, one.step)
    before = [
        _alone(channel, front[channel]) if channel is not Channel.COMPUTE else passes.first_update(one, front[channel])
        for channel in (Channel.TO_DEVICE, Channel.COMPUTE, Channel.NETWORK)
        if channel in front
    ]
    after = [_alone(channel, seconds_K) for channel, seconds_K in behind.items()]
    loads_K = np.concatenate([*before, loads_R[:, order], *after], axis=1)
    count_K = np.ones(loads_K.shape[1])
    waited_K = np.zeros(loads_K.shape[1])
    units = slice(len(before), len(before) + len(waited_R))
    count_K[units], waited_K[units] = passes.lists.count_RJ[order, 0], waited_R[order]
    ends_K = ends_together(loads_K, speed_table(passes.interference, passes.across_nodes))
    rows = np.stack([ends_K.max(axis=0) + waited_K, *ends_K[1:], waited_K], axis=1).tolist()
    if not any(any(row[1:]) for row in rows):
        return ()
    there = [(row, count) for row, count in zip(rows, count_K.tolist(), strict=True) if row[0] > 0.0]
    alike = [(row, sum(count for _, count in some)) for row, some in groupby(there, key=lambda item: item[0])]
    return tuple(value for row, count in alike for value in (count, *row))


def _alone(channel: Channel, seconds_K: FloatArray) -> FloatArray:
    """Loads of a row in which one channel is busy; axes channel and ``K``."""
    return np.eye(len(Channel))[:, [channel]] * seconds_K
