"""Peak bytes of devices that run several stages, the chunks of interleaved 1F1B.

What a device always holds is the union over its chunks; the rest is that of the chunk at hand, and of every chunk the
activations of the microbatches in flight and the buffers of what is on its way
(:mod:`lightning_mist.cost.memory.interleaved_phases`).

Array axes
    S  stages
    K  candidates
    W  ways to recompute
    X  situations
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.batched_stages import Held, held_of_stages
from lightning_mist.cost.inputs import FloatArray, IntArray, Placed, StageSlot, slots_of
from lightning_mist.cost.memory import (
    COUNTED,
    TERMS,
    Bytes,
    MemoryModel,
    NeedTerms,
    SharedOut,
    Situation,
    StageMemory,
    StageNeeds,
    counts_of_groups,
    need_terms,
    situations_of_groups,
)
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import CheckpointingKind, Plan, ZeroStage

ROUNDS = 4
"""Microbatches that are looked at, in rounds of as many as there are groups: warm-up takes at most two, and by the end
of the fourth every chunk has made its gradients and is in its steady state."""

NEAR_BYTES = len(TERMS)
"""By how much sums of terms may differ when every term is rounded to whole bytes."""


def stage_memory(spec: ModelSpec, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, by term; of chunks that share devices, that of these devices."""
    models: dict[tuple[int, bool, CheckpointingKind], MemoryModel] = {}

    def model(slot: StageSlot) -> MemoryModel:
        key = (slot.tensor_parallel_degree, slot.sequence_parallel, slot.checkpointing)
        if key not in models:
            models[key] = MemoryModel(spec.split(*key[:2]).recomputing(key[2]))
        return models[key]

    return plan_memory(model, plan)


def plan_memory(model: Callable[[StageSlot], MemoryModel], plan: Plan) -> tuple[StageMemory, ...]:
    """As :func:`stage_memory`, with models that exist already, by slot."""
    return tuple(memory for memory, _ in plans_needs(model, [plan])[0])


def plans_needs(
    model: Callable[[StageSlot], MemoryModel], plans: Sequence[Plan]
) -> list[tuple[tuple[StageMemory, NeedTerms], ...]]:
    """The peak memory of every stage of some plans, and what its devices' memory is made of."""
    slots = [slots_of(plan) for plan in plans]
    held = iter(held_of_stages(model, [item for found in slots for item in found]))
    return [
        _plan_needs(model, plan, found, [next(held) for _ in found]) for plan, found in zip(plans, slots, strict=True)
    ]


def _plan_needs(
    model: Callable[[StageSlot], MemoryModel], plan: Plan, slots: Sequence[Placed], held: Sequence[Held]
) -> tuple[tuple[StageMemory, NeedTerms], ...]:
    if plan.schedule != "interleaved-1f1b":
        return tuple(
            (model(slot).breakdown(slot, candidates, item.needs, item.host_bytes(slot))[0], need_terms(item.needs))
            for (slot, candidates), item in zip(slots, held, strict=True)
        )
    found = [_Group.of(model(slots[group][0]), plan, group, slots, held) for group in range(plan.num_groups)]
    memory = [item.memory() for item in found]
    groups = [stage % plan.num_groups for stage in range(plan.num_stages)]
    return tuple(
        (memory[group], need_terms(found[group].needs[stage], found[group].always))
        for stage, group in enumerate(groups)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPeaks:
    """Bytes of every stage's most loaded device, and of host memory that it needs, for several ways to recompute.

    Attributes:
        device_SW: On the device; of chunks that share devices the same.
    """

    device_SW: FloatArray
    host_SW: FloatArray


def plans_peaks(model: Callable[[StageSlot], MemoryModel], plans: Sequence[tuple[Plan, IntArray]]) -> list[PlanPeaks]:
    """Peaks of plans, each with other numbers of recomputed layers, in whole bytes."""
    slots = [
        [_recomputing(placed, count_W) for placed, count_W in zip(slots_of(plan), checkpointed_SW, strict=True)]
        for plan, checkpointed_SW in plans
    ]
    held = iter(held_of_stages(model, [item for found in slots for item in found]))
    return [
        _plan_peaks(model, plan, found, [next(held) for _ in found])
        for (plan, _), found in zip(plans, slots, strict=True)
    ]


def _plan_peaks(
    model: Callable[[StageSlot], MemoryModel], plan: Plan, slots: Sequence[Placed], held: Sequence[Held]
) -> PlanPeaks:
    if plan.schedule != "interleaved-1f1b":
        found = [item.peaks(slot) for (slot, _), item in zip(slots, held, strict=True)]
        return PlanPeaks(device_SW=np.stack([item[0] for item in found]), host_SW=np.stack([item[1] for item in found]))
    shape = len(slots), len(slots[0][1])
    device_SW, host_SW = np.empty(shape), np.empty(shape)
    for group in range(plan.num_groups):
        one = _Group.of(model(slots[group][0]), plan, group, slots, held)
        device_SW[group :: plan.num_groups], host_SW[group :: plan.num_groups] = one.peaks(), one.host_bytes()
    return PlanPeaks(device_SW=np.rint(device_SW), host_SW=np.rint(host_SW))


def stage_peaks(
    model: Callable[[StageSlot], MemoryModel], plans: Sequence[tuple[Plan, IntArray]], at: int
) -> list[FloatArray]:
    """Bytes of one stage's most loaded device with other numbers of recomputed layers; not of chunks.

    Args:
        plans: The plans, each with recomputed layers of that stage; axis ``W``.
        at: Which stage; ``-1`` is the last.
    """
    placed = [_recomputing(slots_of(plan)[at], checkpointed_W) for plan, checkpointed_W in plans]
    held = held_of_stages(model, placed)
    return [item.peaks(slot)[0] for item, (slot, _) in zip(held, placed, strict=True)]


def _recomputing(placed: Placed, checkpointed_W: IntArray) -> Placed:
    slot, candidates = placed
    same = candidates.take(np.zeros(len(checkpointed_W), dtype=np.int64))
    return slot, replace(same, checkpointed_K=checkpointed_W)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group of devices: what each of its chunks needs, and what is there all the time."""

    held: Mapping[int, Held]
    needs: Mapping[int, StageNeeds]
    always: Mapping[str, Bytes]
    looked: tuple[int, int, int]
    group: int

    @classmethod
    def of(cls, model: MemoryModel, plan: Plan, group: int, slots: Sequence[Placed], held: Sequence[Held]) -> "_Group":
        """Of one group of a plan, from the slots of all stages and what these hold by themselves."""
        groups = plan.num_groups
        stages = range(group, plan.num_stages, groups)
        own = _needs(model, [slots[stage] for stage in stages], [held[stage].needs for stage in stages])
        moves = any(held[stage].state_K.any() for stage in stages)
        return cls(
            held={stage: held[stage] for stage in stages},
            needs=dict(zip(stages, own, strict=True)),
            always=_always(model, [slots[stage] for stage in stages], own, moves=moves),
            looked=(plan.num_stages, groups, min(plan.num_microbatches, ROUNDS * groups)),
            group=group,
        )

    def memory(self) -> StageMemory:
        """The peak of the most loaded device, of one candidate."""
        always = {name: _number(value) for name, value in self.always.items()}
        best: StageMemory | None = None
        around_X = counts_of_groups(*self.looked)[self.group].bytes(list(self.needs.values()))[:, 0]
        situations = situations_of_groups(*self.looked)[self.group]
        # Only what comes close to the most can be it when its terms are whole bytes.
        for index in np.flatnonzero(around_X >= around_X.max() - NEAR_BYTES).tolist():
            situation = situations[index]
            around = situation_terms(self.needs, situation)
            terms = {name: always.get(name, 0.0) + value for name, value in around.items()}
            found = StageMemory(
                phase="forward" if situation[1] else "backward",
                terms=tuple((name, round(terms.get(name, always.get(name, 0.0)))) for name in TERMS),
            )
            best = found if best is None or found.peak_bytes > best.peak_bytes else best
        for name, update in update_terms(self.needs):
            terms = {term: always.get(term, 0.0) + update.get(term, 0.0) for term in TERMS}
            found = StageMemory(phase=name, terms=tuple((term, round(terms[term])) for term in TERMS))
            best = found if best is None or found.peak_bytes > best.peak_bytes else best
        assert best is not None
        return replace(best, host_bytes=round(_number(self.host_bytes())))

    def peaks(self) -> FloatArray:
        """Bytes of the most loaded device of every candidate."""
        needs = list(self.needs.values())
        peak_K: FloatArray = counts_of_groups(*self.looked)[self.group].bytes(needs).max(axis=0)
        for name in dict.fromkeys(name for item in needs for name, _ in item.update):
            peak_K = np.maximum(peak_K, sum(_update(needs, name).values()))
        return peak_K + sum(self.always.values())

    def host_bytes(self) -> FloatArray:
        """Host memory of one device: what its chunks move, and of each the activations of the most microbatches."""
        in_flight_G = counts_of_groups(*self.looked)[self.group].in_flight_G.tolist()
        each = zip(self.held.values(), in_flight_G, strict=True)
        return sum((item.state_K + count * item.microbatch_K for item, count in each), np.zeros(1))


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
    forward = max(0.0, away - float(counted.forward_AK.max()))
    backward = max(0.0, away - float(counted.backward_AK.max()))
    return replace(
        needs,
        forward_K=needs.forward_K + forward,
        first_backward_K=needs.first_backward_K + backward,
        backward_K=needs.backward_K + backward,
    )


def _always(
    model: MemoryModel, chunks: Sequence[Placed], needs: Sequence[StageNeeds], *, moves: bool
) -> dict[str, Bytes]:
    """What is there all the time: of parameters that two chunks use one copy; ``moves`` says whether state leaves."""
    slot, of_first = chunks[0]
    degree, zero = slot.shard_degree, int(of_first.zero_stage_K[0])
    parameters: Bytes = sum(item.always["parameter_bytes"] for item in needs)
    optimizer: Bytes = sum(item.always["optimizer_bytes"] for item in needs)
    doubled = model.holdings.doubled([candidates for _, candidates in chunks])
    state = model.spec.optimizer.state_bytes_per_parameter_byte
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


def situation_terms(needs: Mapping[int, StageNeeds], situation: Situation) -> dict[str, float]:
    """What changes over a batch, by term."""
    stage, is_forward, made, counts = situation
    sizes = {
        kind: sum(_number(getattr(needs[at], name)) * n for k, at, n in counts if k == kind)
        for kind, name in COUNTED.items()
    }
    gradients = sum(_number(needs[at].gradients_K) for at in made if is_forward or at != stage)
    current = needs[stage]
    if is_forward:
        working = _number(current.forward_K)
    elif stage in made:
        working = _number(current.backward_K) + _number(current.gradients_K) + _number(current.reused_K)
    else:
        working = _number(current.first_backward_K)
    # A backward that makes gradients anew counts its own stage's among those that are still under way.
    counted = 0.0 if is_forward else _number(current.pending_K) * (stage in made)
    pending = max(0.0, max((_number(needs[at].pending_K) for at in made), default=0.0) - counted)
    return {
        "gradient_bytes": gradients + pending,
        "activation_bytes": sizes["others"],
        "transfer_bytes": sum(sizes[kind] for kind in ("received", "gradients", "sent", "handed")),
        "working_bytes": working,
    }


def update_terms(needs: Mapping[int, StageNeeds]) -> list[tuple[str, dict[str, float]]]:
    """What comes after the last backward: all chunks' gradients, and what updates need beside them."""
    each = list(needs.values())
    return [
        (name, {term: _number(value) for term, value in _update(each, name).items()})
        for name in dict.fromkeys(name for item in each for name, _ in item.update)
    ]


def _update(needs: Sequence[StageNeeds], name: str) -> dict[str, Bytes]:
    """What one situation after the last backward needs by term, of several chunks."""
    found = [dict(item.update).get(name, {}) for item in needs]
    gradients: Bytes = sum(terms.get("gradient_bytes", 0.0) for terms in found)
    working = [np.asarray(terms.get("working_bytes", 0.0), dtype=np.float64) for terms in found]
    if name == "gradient reduction":
        # Filling a bucket counts the gradients of its own chunk; those of the others are there too.
        rest: Bytes = sum(item.gradients_K for item in needs)
        over = np.maximum.reduce([fill - item.gradients_K for fill, item in zip(working, needs, strict=True)])
        return {"working_bytes": rest + np.maximum(over, 0.0)}
    # The optimizer updates the parameters of all chunks together.
    combine = np.add if name == "optimizer step" else np.maximum
    return {"gradient_bytes": gradients, "working_bytes": combine.reduce(np.broadcast_arrays(*working))}


def _number(value: object) -> float:
    return float(np.asarray(value).reshape(-1)[0])
