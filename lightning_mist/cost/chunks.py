"""Peak bytes of devices that run several stages, the chunks of interleaved 1F1B.

What a device always holds is the union over its chunks; the rest is that of the chunk at hand, and of every chunk the
activations of the microbatches in flight and the buffers of what is on its way. All of it is read off the very list of
actions that the devices run.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from lightning_mist.cost.candidates import StageCandidates, StageSlot, slots_of
from lightning_mist.cost.held import SharedOut
from lightning_mist.cost.memory import TERMS, MemoryModel, StageMemory
from lightning_mist.cost.need_terms import NeedTerms, need_terms
from lightning_mist.cost.needs import StageNeeds
from lightning_mist.cost.offload import host_microbatch_bytes, host_state_bytes
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Plan, ZeroStage
from lightning_mist.schedule import Action, ActionKind, arrived_sends, generate
from lightning_mist.schedule.lower import add_transfers

ROUNDS = 4
"""Microbatches that are looked at, in rounds of as many as there are groups: warm-up takes at most two, and by the end
of the fourth every chunk has made its gradients and is in its steady state."""

Situation = tuple[int, bool, frozenset[int], tuple[tuple[str, int, int], ...]]
"""Stage that computes, whether forward, stages whose gradients exist, and what there is of every stage: kind, stage and
number."""


def stage_memory(spec: ModelSpec, plan: Plan) -> tuple[StageMemory, ...]:
    """The peak memory of every stage of a plan, by term; of chunks that share devices, that of these devices.

    Args:
        spec: The network.
        plan: The plan.
    """
    models: dict[tuple[int, bool], MemoryModel] = {}

    def model(slot: StageSlot) -> MemoryModel:
        key = (slot.tensor_parallel_degree, slot.sequence_parallel)
        if key not in models:
            models[key] = MemoryModel(spec.split(*key))
        return models[key]

    return plan_memory(model, plan)


def plan_memory(model: Callable[[StageSlot], MemoryModel], plan: Plan) -> tuple[StageMemory, ...]:
    """As :func:`stage_memory`, with models that exist already, by slot."""
    return tuple(memory for memory, _ in plan_needs(model, plan))


def plan_needs(model: Callable[[StageSlot], MemoryModel], plan: Plan) -> tuple[tuple[StageMemory, NeedTerms], ...]:
    """The peak memory of every stage of a plan, and what its devices' memory is made of.

    Args:
        model: Memory of stages of the plan's network, by slot.
        plan: The plan.
    """
    slots = slots_of(plan)
    if plan.schedule != "interleaved-1f1b":
        result = []
        for slot, candidates in slots:
            needs = model(slot).needs(slot, candidates)
            result.append((model(slot).breakdown(slot, candidates, needs)[0], need_terms(needs)))
        return tuple(result)
    found = []
    for group in range(plan.num_groups):
        used = model(slots[group][0])
        needs_of_chunks, always = _of_group(used, plan, group)
        memory = _group_memory(used, plan, group, needs_of_chunks, always)
        found.append((memory, {stage: need_terms(item, always) for stage, item in needs_of_chunks.items()}))
    groups = [found[plan.group_of(stage)] for stage in range(plan.num_stages)]
    return tuple((memory, terms[stage]) for stage, (memory, terms) in enumerate(groups))


def group_memory(model: MemoryModel, plan: Plan, group: int) -> StageMemory:
    """The peak of the most loaded device of a group.

    Args:
        model: Memory of stages of the plan's network, or of one tensor-parallel rank's part of it.
        plan: An interleaved plan.
        group: The group of devices.
    """
    return _group_memory(model, plan, group, *_of_group(model, plan, group))


def _of_group(model: MemoryModel, plan: Plan, group: int) -> tuple[dict[int, StageNeeds], dict[str, float]]:
    """What each chunk of a group needs, and what is there all the time."""
    slots = slots_of(plan)
    needs = _needs(model, [slots[stage] for stage in plan.chunks(group)], plan.chunks(group))
    return needs, _always(model, plan, group, needs)


def _group_memory(
    model: MemoryModel, plan: Plan, group: int, needs: Mapping[int, StageNeeds], always: Mapping[str, float]
) -> StageMemory:
    count = min(plan.num_microbatches, ROUNDS * plan.num_groups)
    best: StageMemory | None = None
    for situation in _situations(plan.num_stages, plan.num_groups, count)[group]:
        terms = {name: always.get(name, 0.0) + value for name, value in situation_terms(needs, situation).items()}
        found = StageMemory(
            phase="forward" if situation[1] else "backward",
            terms=tuple((name, round(terms.get(name, always.get(name, 0.0)))) for name in TERMS),
        )
        best = found if best is None or found.peak_bytes > best.peak_bytes else best
    for name, update in update_terms(needs):
        terms = {term: always.get(term, 0.0) + update.get(term, 0.0) for term in TERMS}
        found = StageMemory(phase=name, terms=tuple((term, round(terms[term])) for term in TERMS))
        best = found if best is None or found.peak_bytes > best.peak_bytes else best
    assert best is not None
    return replace(best, host_bytes=_host_bytes(model, plan, group, needs, count))


def _needs(
    model: MemoryModel, chunks: Sequence[tuple[StageSlot, StageCandidates]], stages: Sequence[int]
) -> dict[int, StageNeeds]:
    """What each chunk needs, where parameters are dealt out over all of them together."""
    found = [model.needs(slot, candidates) for slot, candidates in chunks]
    slot, first = chunks[0]
    if slot.shard_degree > 1 and int(first.zero_stage_K[0]) >= ZeroStage.PARAMETERS and first.offload is None:
        away = model.holdings.together([candidates for _, candidates in chunks], slot.shard_degree).away
        found = [
            _with_away(item, away, model.holdings.shares(candidates, slot.shard_degree))
            for item, (_, candidates) in zip(found, chunks, strict=True)
        ]
    return dict(zip(stages, found, strict=True))


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


def _host_bytes(model: MemoryModel, plan: Plan, group: int, needs: Mapping[int, StageNeeds], count: int) -> int:
    """Host memory of one device: what its chunks move, and of each the activations of the most microbatches at once."""
    slots, total = slots_of(plan), 0.0
    if slots[group][1].offload is None:
        return 0
    in_flight: Counter[int] = Counter()
    for stage, _, _, counts in _situations(plan.num_stages, plan.num_groups, count)[group]:
        others = {at: n for kind, at, n in counts if kind == "others"}
        for at in needs:
            in_flight[at] = max(in_flight[at], others.get(at, 0) + (at == stage))
    for stage, item in needs.items():
        slot, candidates = slots[stage]
        moved_K = host_microbatch_bytes(model, slot, candidates, item)
        total += _number(host_state_bytes(model, slot, candidates) + in_flight[stage] * moved_K)
    return round(total)


def _always(model: MemoryModel, plan: Plan, group: int, needs: Mapping[int, StageNeeds]) -> dict[str, float]:
    """What is there all the time: of parameters that two chunks use one copy."""
    slots = slots_of(plan)
    chunks = [slots[stage] for stage in plan.chunks(group)]
    first = next(iter(needs.values()))
    degree, zero = chunks[0][0].shard_degree, int(chunks[0][1].zero_stage_K[0])
    parameters = sum(_number(item.always["parameter_bytes"]) for item in needs.values())
    optimizer = sum(_number(item.always["optimizer_bytes"]) for item in needs.values())
    doubled = model.holdings.doubled([candidates for _, candidates in chunks])
    state = model.spec.optimizer.state_bytes_per_parameter_byte
    if degree > 1 and zero >= ZeroStage.OPTIMIZER and chunks[0][1].offload is None:
        owned = model.holdings.together([candidates for _, candidates in chunks], degree)
        optimizer = state * owned.trained
        parameters = owned.every if zero >= ZeroStage.PARAMETERS else parameters - doubled[0]
    else:
        shares = degree if zero >= ZeroStage.OPTIMIZER else 1
        parameters -= doubled[0] / (degree if zero >= ZeroStage.PARAMETERS else 1)
        optimizer -= state * doubled[1] / shares
    return {
        "parameter_bytes": parameters,
        "buffer_bytes": _number(first.always["buffer_bytes"]),
        "optimizer_bytes": optimizer,
        "batch_bytes": _number(first.always["batch_bytes"]),
        # The chunks of a device run one after the other and use the same buffers.
        "offload_bytes": max(_number(item.always.get("offload_bytes", 0.0)) for item in needs.values()),
    }


def situation_terms(needs: Mapping[int, StageNeeds], situation: Situation) -> dict[str, float]:
    """What changes over a batch, by term.

    Args:
        needs: Those of the chunks of a group of devices, by stage.
        situation: What there is of each of them.
    """
    stage, is_forward, made, counts = situation
    of = {
        "others": "saved_K",
        "received": "entering_K",
        "gradients": "leaving_K",
        "sent": "returned_K",
        "handed": "handed_K",
    }
    sizes = {kind: sum(_number(getattr(needs[at], of[kind])) * n for k, at, n in counts if k == kind) for kind in of}
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
    """What comes after the last backward: all chunks' gradients, and the most that one chunk needs beside them.

    Args:
        needs: Those of the chunks of a group of devices, by stage.
    """
    names = dict.fromkeys(name for item in needs.values() for name, _ in item.update)
    result = []
    for name in names:
        found = [dict(item.update).get(name, {}) for item in needs.values()]
        gradients = sum(_number(terms.get("gradient_bytes", 0.0)) for terms in found)
        working = [_number(terms.get("working_bytes", 0.0)) for terms in found]
        if name == "gradient reduction":
            # Filling a bucket counts the gradients of its own chunk; those of the others are there too.
            rest = sum(_number(item.gradients_K) for item in needs.values())
            over = max(fill - _number(item.gradients_K) for fill, item in zip(working, needs.values(), strict=True))
            result.append((name, {"working_bytes": rest + max(over, 0.0)}))
            continue
        result.append((name, {"gradient_bytes": gradients, "working_bytes": max(working)}))
    return result


def _number(value: object) -> float:
    return float(np.asarray(value).reshape(-1)[0])


@lru_cache(maxsize=256)
def _situations(num_stages: int, num_groups: int, num_microbatches: int) -> tuple[tuple[Situation, ...], ...]:
    """The situations around the computations of every group of devices."""
    lists = add_transfers(generate(num_stages, num_microbatches, "interleaved-1f1b", num_groups=num_groups))
    arrivals = arrived_sends(lists)
    return tuple(
        tuple(dict.fromkeys(situation for _, situation in situations_in_order(actions, arrivals[group])))
        for group, actions in enumerate(lists)
    )


def situations_in_order(
    actions: Sequence[Action], arrivals: Mapping[Action, Sequence[Action]]
) -> list[tuple[Action, Situation]]:
    """The situation around each computation of a list, in its order.

    Args:
        actions: The list, with transfers.
        arrivals: Which sends each computation finds arrived; see :func:`~lightning_mist.schedule.arrived_sends`.
    """
    found: list[tuple[Action, Situation]] = []
    there: Counter[tuple[str, int]] = Counter()
    made: set[int] = set()
    receives = {ActionKind.RECV_ACTIVATION: "received", ActionKind.RECV_GRADIENT: "gradients"}
    sends = {ActionKind.SEND_GRADIENT: "sent", ActionKind.SEND_ACTIVATION: "handed"}
    sent: dict[Action, tuple[str, int]] = {}
    for action in actions:
        stage = action.stage
        if action.kind in receives:
            there[receives[action.kind], stage] += 1
        elif action.kind in sends:
            sent[action] = (sends[action.kind], stage)
            there[sent[action]] += 1
        elif action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            is_forward = action.kind is ActionKind.FORWARD
            for send in arrivals.get(action, ()):
                if send in sent:
                    there[sent.pop(send)] -= 1
            if not is_forward:
                # The saved bytes of the microbatch at hand, and the gradient where its output was, are in its working.
                there["others", stage] -= 1
                there["gradients", stage] -= there["gradients", stage] > 0
            counts = tuple((kind, at, n) for (kind, at), n in sorted(there.items()) if n)
            found.append((action, (stage, is_forward, frozenset(made), counts)))
            if is_forward:
                there["others", stage] += 1
            else:
                made.add(stage)
                there["received", stage] -= there["received", stage] > 0
    return found
