"""Peak bytes of a plan's devices, which run one stage each or several, the chunks of interleaved 1F1B.

What a device always holds is the union over its chunks; what changes over a batch is counted along its list of actions
(:mod:`lightning_mist.cost.memory.moments`).

Array axes
    S  stages
    K  candidates, and ways to recompute
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.batched_stages import needs_of_stages
from lightning_mist.cost.inputs import FloatArray, IntArray, Placed, StageSlot, slots_of
from lightning_mist.cost.memory import (
    Bytes,
    MemoryModel,
    Moments,
    NeedTerms,
    PeakParts,
    SharedOut,
    StageMemory,
    StageNeeds,
    Updates,
    device_memory,
    device_moments,
    moments_of,
    need_terms,
)
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, StageMethod, ZeroStage


def stage_memory(spec: ModelSpec, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, by term; of chunks that share devices, that of these devices."""
    models: dict[tuple[int, bool, StageMethod], MemoryModel] = {}

    def model(slot: StageSlot) -> MemoryModel:
        key = (slot.tensor_parallel_degree, slot.sequence_parallel, slot.method)
        if key not in models:
            models[key] = MemoryModel(spec.split(*key[:2]).computing(key[2]))
        return models[key]

    return plan_memory(model, plan)


def plan_memory(model: Callable[[StageSlot], MemoryModel], plan: Plan) -> tuple[StageMemory, ...]:
    """As :func:`stage_memory`, with models that exist already, by slot."""
    return tuple(memory for memory, _ in plans_needs(model, [plan])[0])


def plans_needs(
    model: Callable[[StageSlot], MemoryModel], plans: Sequence[Plan]
) -> list[tuple[tuple[StageMemory, NeedTerms], ...]]:
    """The peak memory of every stage of some plans, and what its devices' memory is made of."""
    result = []
    for plan, groups in zip(plans, _groups(model, plans, [slots_of(plan) for plan in plans]), strict=True):
        memory = [group.memory() for group in groups]
        at = [stage % plan.num_groups for stage in range(plan.num_stages)]
        each = (
            (memory[group], need_terms(groups[group].needs[stage], groups[group].always))
            for stage, group in enumerate(at)
        )
        result.append(tuple(each))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPeaks:
    """Bytes of every stage's most loaded device, and of host memory that it needs, for several ways to recompute.

    Attributes:
        device_SK: On the device; of chunks that share devices the same.
    """

    device_SK: FloatArray
    host_SK: FloatArray


def plans_peaks(model: Callable[[StageSlot], MemoryModel], plans: Sequence[tuple[Plan, IntArray]]) -> list[PlanPeaks]:
    """Peaks of plans, each with other numbers of recomputed layers, in whole bytes."""
    slots = [
        [_recomputing(placed, count_K) for placed, count_K in zip(slots_of(plan), checkpointed_SK, strict=True)]
        for plan, checkpointed_SK in plans
    ]
    result = []
    for (plan, _), groups in zip(plans, _groups(model, [plan for plan, _ in plans], slots), strict=True):
        found = np.rint([(group.peaks(), group.host_bytes()) for group in groups])
        device_SK, host_SK = np.tile(found, (plan.num_stages // plan.num_groups, 1, 1)).swapaxes(0, 1)
        result.append(PlanPeaks(device_SK=device_SK, host_SK=host_SK))
    return result


def stage_peaks(
    model: Callable[[StageSlot], MemoryModel], plans: Sequence[tuple[Plan, IntArray]], at: int
) -> list[FloatArray]:
    """Bytes of one stage's most loaded device with other numbers of recomputed layers; not of chunks.

    Args:
        plans: The plans, each with recomputed layers of that stage; axis ``K``.
        at: Which stage; ``-1`` is the last.
    """
    placed = [_recomputing(slots_of(plan)[at], checkpointed_K) for plan, checkpointed_K in plans]
    needs = needs_of_stages(model, placed)
    return [np.rint(item.peaks(moments_of(slot))) for item, (slot, _) in zip(needs, placed, strict=True)]


def _recomputing(placed: Placed, checkpointed_K: IntArray) -> Placed:
    slot, candidates = placed
    same = candidates.take(np.zeros(len(checkpointed_K), dtype=np.int64))
    return slot, replace(same, checkpointed_K=checkpointed_K)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group of devices: what each of its stages needs, and what is there all the time."""

    needs: Mapping[int, StageNeeds]
    always: Mapping[str, Bytes]
    moments: Moments

    @classmethod
    def of(
        cls, model: MemoryModel, plan: Plan, group: int, slots: Sequence[Placed], alone: Sequence[StageNeeds]
    ) -> "_Group":
        """Of one group of a plan, from the slots of all stages and what these need by themselves."""
        stages = plan.chunks(group)
        chunks, needs = [slots[stage] for stage in stages], [alone[stage] for stage in stages]
        always = needs[0].always
        if len(stages) > 1:
            needs = _needs(model, chunks, needs)
            always = _always(model, chunks, needs)
        return cls(
            needs=dict(zip(stages, needs, strict=True)),
            always=always,
            moments=device_moments(group, plan.num_stages, plan.num_microbatches, plan.schedule, plan.num_groups),
        )

    def memory(self) -> StageMemory:
        """The peak of the most loaded device, of one candidate."""
        needs = list(self.needs.values())
        return device_memory(needs, self.always, updates_of(needs), self.moments, self.host_bytes())[0]

    def peaks(self) -> FloatArray:
        """Bytes of the most loaded device of every candidate."""
        needs = list(self.needs.values())
        return PeakParts.of_chunks(needs, self.always, updates_of(needs)).peaks(self.moments)

    def host_bytes(self) -> FloatArray:
        """Host memory of one device: what its stages move, and of each the activations of the most microbatches."""
        each = [item.host_bytes(self.moments, chunk) for chunk, item in enumerate(self.needs.values())]
        total_K: FloatArray = np.sum(each, axis=0)
        return total_K


def _groups(
    model: Callable[[StageSlot], MemoryModel], plans: Sequence[Plan], slots: Sequence[Sequence[Placed]]
) -> list[list[_Group]]:
    """The groups of devices of each plan, from the slots of all stages."""
    needs = iter(needs_of_stages(model, [item for found in slots for item in found]))
    result = []
    for plan, found in zip(plans, slots, strict=True):
        own = [next(needs) for _ in found]
        result.append([_Group.of(model(found[group][0]), plan, group, found, own) for group in range(plan.num_groups)])
    return result


def _needs(model: MemoryModel, chunks: Sequence[Placed], found: Sequence[StageNeeds]) -> list[StageNeeds]:
    """What each chunk needs, where parameters are dealt out over all of them together."""
    slot, first = chunks[0]
    if slot.shard_degree == 1 or int(first.zero_stage_K[0]) < ZeroStage.PARAMETERS:
        return list(found)
    away = model.holdings.together([candidates for _, candidates in chunks], slot.shard_degree).away
    return [
        _with_away(item, away, model.holdings.shares(candidates, slot.shard_degree))
        for item, (_, candidates) in zip(found, chunks, strict=True)
    ]


def _with_away(needs: StageNeeds, away: float, counted: SharedOut) -> StageNeeds:
    """Needs whose working sets have as many parameters of other owners as any computation of the device's may."""
    forward = max(0.0, away - float(counted.forward_RK.max()))
    backward = max(0.0, away - float(counted.backward_RK.max()))
    return replace(
        needs,
        forward_K=needs.forward_K + forward,
        first_backward_K=needs.first_backward_K + backward,
        backward_K=needs.backward_K + backward,
    )


def _always(model: MemoryModel, chunks: Sequence[Placed], needs: Sequence[StageNeeds]) -> dict[str, Bytes]:
    """What is there all the time: of parameters that two chunks use one copy."""
    slot, of_first = chunks[0]
    degree, zero = slot.shard_degree, int(of_first.zero_stage_K[0])
    parameters: Bytes = sum(item.always["parameter_bytes"] for item in needs)
    optimizer: Bytes = sum(item.always["optimizer_bytes"] for item in needs)
    doubled = model.holdings.doubled([candidates for _, candidates in chunks])
    state = model.spec.optimizer.state_bytes_per_parameter_byte
    moves = any(item.host_state_K.any() for item in needs)
    if degree > 1 and zero >= ZeroStage.OPTIMIZER and not moves:
        owned = model.holdings.together([candidates for _, candidates in chunks], degree)
        optimizer = state * owned.trained
        parameters = owned.every if zero >= ZeroStage.PARAMETERS else parameters - doubled[0]
    else:
        shares = degree if zero >= ZeroStage.OPTIMIZER else 1
        parameters = parameters - doubled[0] / (degree if zero >= ZeroStage.PARAMETERS else 1)
        optimizer = optimizer - state * doubled[1] / shares
    # The chunks of a device run one after the other and use the same buffers.
    buffers = [np.asarray(item.always.get("offload_bytes", 0.0), dtype=np.float64) for item in needs]
    return {
        "parameter_bytes": parameters,
        "buffer_bytes": needs[0].always["buffer_bytes"],
        "optimizer_bytes": optimizer,
        "batch_bytes": needs[0].always["batch_bytes"],
        "offload_bytes": np.maximum.reduce(buffers),
    }


def updates_of(chunks: Sequence[StageNeeds]) -> Updates:
    """What comes after the last backward of devices that run one stage or several: name and bytes by term."""
    if len(chunks) == 1:
        return chunks[0].update
    names = dict.fromkeys(name for item in chunks for name, _ in item.update)
    return tuple((name, _update(chunks, name)) for name in names)


def _update(needs: Sequence[StageNeeds], name: str) -> dict[str, Bytes]:
    """What is there at one thing after the last backward by term, of several chunks."""
    found = [dict(item.update).get(name, {}) for item in needs]
    gradients: Bytes = sum(terms.get("gradient_bytes", 0.0) for terms in found)
    working = [np.asarray(terms.get("working_bytes", 0.0), dtype=np.float64) for terms in found]
    if name == "gradient reduction":
        # Filling a bucket counts the gradients of its own chunk; those of the others are there too.
        rest: Bytes = sum(item.gradients_K for item in needs)
        over = np.maximum.reduce([fill - item.gradients_K for fill, item in zip(working, needs, strict=True)])
        return {"gradient_bytes": gradients, "working_bytes": rest + np.maximum(over, 0.0)}
    # The optimizer updates the parameters of all chunks together, and buffers in which they travel may be of several.
    combine = np.add if name in ("optimizer step", "parameter gathering") else np.maximum
    return {"gradient_bytes": gradients, "working_bytes": combine.reduce(np.broadcast_arrays(*working))}
