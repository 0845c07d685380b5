"""Seconds that ZeRO-2 and ZeRO-3 add to every microbatch: reducing gradients and unsharding parameters, unit by unit.

They are what passes take beyond computing, row by row (:mod:`lightning_mist.cost.time.pass_seconds`), with nothing
copied. A batch begins with no unit there, and where a forward follows a forward, or a backward a backward, the two
outermost units are unsharded once more. What happens so often per batch is spread over its microbatches.

A gradient is reduced with the first unit of its stage that uses the parameter, which is the last in backward.

Array axes
    K  candidates
    J  those of them that share gradients, or parameters; or first regions of stages, as far as they differ
    R  units, which are regions
"""

from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray, StageRegions, StageSlot
from lightning_mist.cost.time.offload_loads import unit_question
from lightning_mist.cost.time.pass_seconds import AGAIN, BETWEEN, PassKind, RowSums, SummedPasses
from lightning_mist.plan import ZeroStage
from lightning_mist.schedule import ActionKind

_KINDS = ActionKind.FORWARD, ActionKind.BACKWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Communication of units beside computation, among the ranks of stages that have the same rows and degrees.

    Attributes:
        unshard_R: Seconds of giving out each unit's parameters.
        reduce_JR: Seconds of reducing its gradients.
        row_R: Row of them for a stage that begins with each unit.
        sums: Rows of units, of the questions of :func:`~lightning_mist.cost.time.offload_loads.unit_loads`.
    """

    unshard_R: FloatArray
    reduce_JR: FloatArray
    row_R: IntArray
    is_one_unit: bool
    sums: RowSums

    def passes(self, zero_stage_K: IntArray, regions: StageRegions) -> SummedPasses:
        """Passes of stages without copies."""
        question_K = unit_question(zero_stage_K, self.row_R[regions.low_K], len(self.reduce_JR))
        return SummedPasses(self.sums, question_K, regions)

    def between(self, *, is_unsharded: bool) -> FloatArray:
        """What each unit between others adds to a microbatch at least, if it is not recomputed, and if it is."""
        rows = len(self.reduce_JR)
        asked = slice((1 + is_unsharded) * rows, (2 + is_unsharded) * rows)
        forward_sums, backward_sums = (self.sums.of(PassKind(kind))[2, asked] for kind in _KINDS)
        least_by_kind_R: FloatArray = np.diff(forward_sums + backward_sums)[:, [BETWEEN, BETWEEN | AGAIN]].min(axis=0)
        return least_by_kind_R


UNSHARDED = ("forward_unshard_K", "backward_unshard_K", "begin_K", "forward_again_K", "backward_again_K")
"""What unsharding adds to a forward that follows a backward of its stage, and to a backward that follows a forward;
beyond that to the first forward of a batch, and to other forwards and backwards that follow no such pass."""


def shared_seconds(
    beside: Beside, slot: StageSlot, regions: StageRegions, zero_stage_K: IntArray
) -> dict[str, FloatArray]:
    """What unsharding (ZeRO-3) and reducing (from ZeRO-2 on) add beyond computation, by term of a stage's seconds."""
    terms = {name: np.zeros(len(regions)) for name in (*UNSHARDED, "scatter_K")}
    takes_turns, count = slot.schedule == "interleaved-1f1b", slot.num_microbatches

    def asked(zero_stage: ZeroStage) -> tuple[IntArray, SummedPasses]:
        at_J = np.flatnonzero(zero_stage_K >= zero_stage)
        return at_J, beside.passes(np.full(len(at_J), zero_stage), regions.take(at_J))

    at_J, passes = asked(ZeroStage.GRADIENTS)
    terms["scatter_K"][at_J] = passes.beyond(PassKind(ActionKind.BACKWARD))
    at_J, passes = asked(ZeroStage.PARAMETERS)
    if beside.is_one_unit and not takes_turns:
        # Nothing ever takes its place.
        terms["begin_K"][at_J] = passes.regions.sums(beside.unshard_R)
    else:
        low_J, last_J = passes.regions.low_K, passes.regions.last_K
        # One or two units never leave, but where chunks of other layers come between.
        is_many_J = last_J - low_J >= (1 if takes_turns else 2)
        alone_J = beside.unshard_R[low_J] * ((last_J == low_J) & takes_turns)
        for kind, name in zip(_KINDS, ("forward", "backward"), strict=True):
            here_J, away_J = (passes.beyond(PassKind(kind, away=away)) for away in (False, True))
            terms[f"{name}_unshard_K"][at_J] = here_J
            terms[f"{name}_again_K"][at_J] = np.where(is_many_J, passes.restarted(kind, here_J, away_J), alone_J)
            if kind is ActionKind.FORWARD:
                terms["begin_K"][at_J] = away_J - here_J
        terms["backward_unshard_K"][at_J] -= terms["scatter_K"][at_J]
    (forwards, backwards), adds = restarts(slot), count > 1 and slot.schedule not in ("gpipe", "interleaved-1f1b")
    forward_K, backward_K, begin_K, forward_again_K, backward_again_K = (terms[name] for name in UNSHARDED)
    once_K = begin_K + forwards * forward_again_K + backwards * backward_again_K
    mean = {"unshard_K": forward_K + backward_K + once_K / count}
    return terms | mean | {"again_K": adds * (forward_again_K + backward_again_K) / count}


def restarts(slot: StageSlot) -> tuple[int, int]:
    """How many forwards of a batch follow one of their own stage, and how many backwards do.

    Chunks of a group of devices take turns, by and large: all but the first count there, which is never too few.
    """
    others = slot.num_microbatches - 1
    if slot.schedule == "interleaved-1f1b":
        return others, slot.num_microbatches
    ahead = others if slot.schedule == "gpipe" else min(slot.stages_behind, others)
    return ahead, ahead
