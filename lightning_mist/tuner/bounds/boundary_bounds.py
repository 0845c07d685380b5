"""Lower bounds of what a stage takes once per batch, beyond a microbatch in the middle of it.

Counted are the optimizer's step, averaging gradients, and giving out updated parameters. Where state is offloaded the
step may happen in the next first forward, beside which parameters are given out. With ``C`` the seconds of two loads
that run together, ``f`` and ``b`` computing a forward and a backward, ``o`` the update, ``m`` averaging gradients and
``e`` giving out parameters, steady and boundary time together are at least

    C(f + o, e) + C(b, m)  =  f + b + o + beyond(f + o, e) + beyond(b, m),

whatever is copied. ``C`` grows with each load, so that it may be taken of the least that each can be.

Array axes
    X  positions in a pipeline
    K  ranges on one arrangement of devices
"""

from collections.abc import Collection

import numpy as np

from lightning_mist.cost import StageCostModel, StageSlot
from lightning_mist.cost.inputs import FloatArray
from lightning_mist.cost.time import beyond_computing, bucketed_seconds, interference_of, shard_nodes, step_seconds_once
from lightning_mist.plan import ZeroStage


def least_once(
    model: StageCostModel,
    slot: StageSlot,
    zero_stages: Collection[int],
    trained_XK: FloatArray,
    forward_XK: FloatArray,
    backward_XK: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds beyond a microbatch in the middle of a batch.

    Args:
        zero_stages: ZeRO stages of which the least counts.
        trained_XK: Bytes of trained parameters that ranges hold at least.
        forward_XK: Seconds of computing a forward, at least.
        backward_XK: The same of a backward, with what it recomputes.

    Returns:
        Them with the step behind the last backward, and with the step in the next forward.
    """
    if model.profile.corrections:
        # Runs have corrected each term by itself.
        return np.zeros_like(trained_XK), np.zeros_like(trained_XK)
    machine, degree = (model.profile, model.cluster), slot.shard_degree
    across = shard_nodes(model.cluster, slot) > 1
    beside = interference_of(*machine), across
    found = []
    for zero_stage in zero_stages:
        shares = zero_stage >= ZeroStage.OPTIMIZER and degree > 1
        reduces, gives = shares and zero_stage >= ZeroStage.GRADIENTS, shares and zero_stage < ZeroStage.PARAMETERS
        owned_XK, none_XK = trained_XK / (degree if shares else 1), np.zeros_like(trained_XK)
        flags = np.full(trained_XK.shape, reduces), np.full(trained_XK.shape, gives)
        update_XK = step_seconds_once(machine, model.spec, slot, (trained_XK, none_XK, owned_XK), flags)
        averaged_XK = given_XK = none_XK
        if degree > 1 and not reduces:
            operation, messages = ("reduce", degree) if shares else ("all_reduce", 1)
            averaged_XK = bucketed_seconds(machine, slot, operation, trained_XK, messages)
        if gives:
            given_XK = bucketed_seconds(machine, slot, "broadcast", trained_XK, degree)
        both_XK = update_XK + beyond_computing(backward_XK, averaged_XK, *beside)
        found.append((both_XK + given_XK, both_XK + beyond_computing(forward_XK + update_XK, given_XK, *beside)))
    behind, inside = (np.min(items, axis=0) for items in zip(*found, strict=True))
    return behind, inside
