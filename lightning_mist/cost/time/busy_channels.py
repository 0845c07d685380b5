"""When each channel of a stage's devices is busy inside its passes, row by row.

The seconds of a plan count what channels take beyond computing; here are the rows that they are made of
(:mod:`lightning_mist.cost.time.pass_seconds`), each with the time at which its channels are done: how many units have
it, and of each its seconds, for how long from its beginning it communicates and copies to the device and to the host,
and how long computing then waits for parameters that only their owner fetches (ZeRO-3). What hides behind nothing has
rows of its own.

Parameters of the two outermost units stay from one pass to the next in the middle of a batch, and are given out in its
first forward: a middle microbatch is what is told.
"""

from dataclasses import replace
from itertools import groupby

import numpy as np

from lightning_mist.cost.inputs import FloatArray, OffloadCandidates, StageRegions
from lightning_mist.cost.time.offload_loads import CopyStages, loads_of, ratios_of
from lightning_mist.cost.time.overlap import CopyRates
from lightning_mist.cost.time.pass_seconds import Passes, PassKind
from lightning_mist.hardware import Interference
from lightning_mist.hardware.profile import ends_together, speed_table
from lightning_mist.plan import OffloadRatios
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.stage_program import Channel

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
