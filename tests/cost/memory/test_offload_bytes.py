"""Offload: every figure is also counted here layer by layer and rank by rank, by the module's docstring."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import MemoryModel, StageCandidates, stage_memory
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.model.spec.model_spec import with_master_weights
from lightning_mist.plan import OFFLOAD_KINDS, OffloadRatios
from lightning_mist.plan.sharding import assign_owners
from tests.cost.events import WIDTH, with_events
from tests.cost.memory.breakdown import breakdown
from tests.plans import plan_of
from tests.specs import ADAMW, candidates_of, slot_of, spec
from tests.tiers import examples

KINDS = ("parameters", "gradients", "optimizer", "activations")
ratios = st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.99, 1.0])


def network(layers=4, **changes):
    return spec(layers, kinds=[index % 2 for index in range(layers)], widths=(1000, 1400), **changes)


def slot(**changes):
    return slot_of(**{"num_microbatches": 2, "rows": 4, "batch_rows": 8, **changes})


def candidates(layers=(0, 4), *, checkpointed=0, zero=1, **given):
    return candidates_of(*layers, checkpointed, zero, offload=OffloadCandidates.of(OffloadRatios(**given)))


def sizes_of(uses, trained=True):
    """Bytes of parameters by unit of a whole network."""
    found = {}
    for item in uses.parameters:
        name = item.name.rsplit(".", 1)[0]
        found.setdefault(name, []).append(item.bytes if item.trainable or not trained else 0)
    return list(found.values())


def moved(sizes, ratio):
    """What of one unit is moved."""
    left, result = ratio * sum(sizes), [False] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[index] and sizes[index] <= left + 1e-6:
            result[index], left = True, left - sizes[index]
    return result


def counted(uses, ratio, ranks=1, trained=True):
    """Resident, moved, largest moved of a unit, and largest unit, each of the rank that has most.

    Then the largest moved parameter, and the largest moved of a layer, or of all where no layer moves anything.
    """
    units = sizes_of(uses, trained)
    owners = iter(assign_owners([size for unit in units for size in unit], ranks))
    totals = [[[0, 0] for _ in units] for _ in range(ranks)]
    for at, unit in enumerate(units):
        for size, away in zip(unit, moved(unit, ratio), strict=True):
            totals[next(owners)][at][away] += size
    by_rank = [[sum(unit[kind] for unit in rank) for rank in totals] for kind in (0, 1)]
    largest = max(unit[1] for rank in totals for unit in rank)
    single = max(size * away for unit in units for size, away in zip(unit, moved(unit, ratio), strict=True))
    most = max(sum(unit) for rank in totals for unit in rank)
    of_layers = max(unit[1] for rank in totals for unit in rank[1:-1])
    return max(by_rank[0]), max(by_rank[1]), largest, most, single, of_layers or largest


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("masters", [False, True])
@given(wo=ratios, go=ratios, oo=ratios, in_parts=st.booleans())
@settings(max_examples=examples(8))
def test_states_rank_by_rank(masters, zero, ranks, wo, go, oo, in_parts):
    optimizer = dataclasses.replace(
        ADAMW, step_peak_bytes_per_parameter_byte=1.0, step_peak_bytes_per_largest=0.0, is_entrywise=in_parts
    )
    uses = network(optimizer=optimizer, precision="bf16-true")
    # Masters are state beside two moments, in a type twice as large, which gradients are added up in.
    factor, kept = (2, 6) if masters else (1, 2)
    uses = with_master_weights(uses) if masters else uses
    model, place = MemoryModel(uses), slot(data_parallel_degree=ranks)
    some = candidates(zero=zero, parameters=wo, gradients=go, optimizer=oo)
    needs = model.needs(place, some)
    parameters = counted(uses, wo, ranks if zero == 3 else 1)
    gradients = counted(uses, go, ranks if zero >= 2 else 1)
    state = counted(uses, oo, ranks)
    at_step = counted(uses, go, ranks)[0]
    assert needs.always["parameter_bytes"] == parameters[0]
    assert needs.gradients_K == factor * gradients[0]
    assert needs.always["optimizer_bytes"] == kept * state[0]
    # Beside the rooms the gradient that is made.
    sums = factor * (2 * gradients[2] + gradients[4])
    # What is reduced behind the last backward travels in the type of parameters.
    sums += gradients[2] * (masters and zero < 2 and ranks > 1)
    room = min(state[2], state[5]) if in_parts and ranks == 1 else state[2]
    assert needs.always["offload_bytes"] == 2 * (parameters[2] + kept * room) + sums
    step = dict(needs.update)["optimizer step"]
    assert step["gradient_bytes"] == factor * at_step
    owned = counted(uses, 0.0, ranks)[0]
    by_units = parameters[1] or counted(uses, go, ranks)[1] or state[1]
    # A third unit's parameters, and no gradient that is made.
    stepped = factor * (state[3] if by_units else owned)
    assert step["working_bytes"] == stepped + parameters[2] - factor * gradients[4]
    (memory,) = breakdown(model, place, some)
    assert memory.host_bytes == parameters[1] + factor * gradients[1] + kept * state[1]


def walk(uses, rows, checkpointed, ratio, *, direction, checkpoints=None):
    """Largest bytes of one microbatch in a forward or a later backward, part by part."""
    costs = MemoryModel(uses).costs(rows)
    count = uses.num_layers
    kept = [*(costs.checkpointed_saved_R if k < checkpointed else costs.saved_R for k in range(count))]
    saved = [float(costs.saved_R[0]), *(float(kept[k][k + 1]) for k in range(count)), float(costs.saved_R[-1])]
    own = ratio if checkpoints is None else checkpoints
    # What the last recomputed layer hands on the next one keeps.
    ratios = [own] * (checkpointed - 1) + [min(own, ratio) if checkpointed < count else own] * (checkpointed > 0)
    ratios += [ratio] * (count - checkpointed)
    away = [0.0, *(ratio * size for ratio, size in zip(ratios, saved[1:-1], strict=True)), 0.0]
    peaks = []
    for part in range(count + 2):
        before = sum(saved[:part]) - sum(away[:part])
        below = away[part - 1] if part else 0.0
        if direction == "forward":
            peaks.append(before + float(costs.forward_peak_R[part]) + below)
            continue
        recomputed = 0 < part <= checkpointed
        of = costs.recompute_backward_peak_R if recomputed else costs.backward_peak_R
        # Its own tensors are whole, and those of the layer below arrive.
        peaks.append(before + saved[part] + float(of[part]) + below)
    return max(peaks), sum(saved) - sum(away), sum(away)


@pytest.mark.parametrize("checkpointed", [0, 2, 4])
@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_activations_layer_by_layer(checkpointed, ratio):
    uses = spec(4)
    model, some = MemoryModel(uses), candidates(checkpointed=checkpointed, activations=ratio)
    needs = model.needs(slot(), some)
    forward, stays, away = walk(uses, 4, checkpointed, ratio, direction="forward")
    backward = walk(uses, 4, checkpointed, ratio, direction="backward")[0]
    assert needs.forward_K == pytest.approx(forward)
    assert needs.backward_K == pytest.approx(backward)
    assert needs.saved_K == pytest.approx(stays)
    # A lone stage has one microbatch in flight.
    assert breakdown(model, slot(), some)[0].host_bytes == pytest.approx(away, abs=1)


@pytest.mark.parametrize("checkpointed", [0, 1, 2, 4])
@pytest.mark.parametrize(("ratio", "checkpoints"), [(0.0, 1.0), (0.25, 1.0), (1.0, 0.25), (1.0, 0.0)])
def test_checkpoints_layer_by_layer(checkpointed, ratio, checkpoints):
    uses = spec(4)
    model, some = MemoryModel(uses), candidates(checkpointed=checkpointed, activations=ratio, checkpoints=checkpoints)
    needs = model.needs(slot(), some)
    forward, stays, away = walk(uses, 4, checkpointed, ratio, checkpoints=checkpoints, direction="forward")
    backward = walk(uses, 4, checkpointed, ratio, checkpoints=checkpoints, direction="backward")[0]
    assert needs.saved_K == pytest.approx(stays)
    assert breakdown(model, slot(), some)[0].host_bytes == pytest.approx(away, abs=1)
    assert needs.forward_K == pytest.approx(forward)
    assert needs.backward_K == pytest.approx(backward)
    if checkpointed in (0, 4):
        same = candidates(checkpointed=checkpointed, activations=checkpoints if checkpointed else ratio)
        for name in ("saved_K", "forward_K", "first_backward_K", "backward_K", "host_microbatch_K"):
            assert np.array_equal(getattr(needs, name), getattr(model.needs(slot(), same), name)), name


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_what_a_stage_hands_on_is_sent_and_not_moved(ratio):
    model, some = MemoryModel(with_events(spec(4))), candidates((0, 2), activations=ratio)
    place = slot(num_stages=2, rows=2)
    needs, whole = (model.needs(place, item) for item in (some, dataclasses.replace(some, offload=None)))
    assert needs.handed_K == whole.handed_K == 2 * WIDTH
    # Both layers keep nine widths and what they are given, by the head and by the first.
    assert whole.saved_K - needs.saved_K == ratio * 2 * 20 * WIDTH
    assert needs.host_microbatch_K == ratio * 2 * 20 * WIDTH
    # What a later stage receives stays, and what the last layer of all hands on is the tail's.
    last, again = candidates((2, 4), activations=ratio), candidates((0, 2), activations=ratio, checkpointed=2)
    at_end = dataclasses.replace(place, stage_index=1)
    assert model.needs(at_end, last).host_microbatch_K == ratio * 2 * 19 * WIDTH
    assert model.needs(place, again).host_microbatch_K == ratio * 2 * 2 * WIDTH


def test_microbatches_in_flight_are_in_host_memory_too():
    uses = spec(4)
    model, some = MemoryModel(uses), candidates((0, 2), activations=0.5)
    place = slot(num_stages=4, num_microbatches=8)
    microbatch = 4 * 2 * 10_000 // 2
    assert breakdown(model, place, some)[0].host_bytes == 4 * microbatch
    assert breakdown(model, dataclasses.replace(place, num_microbatches=2), some)[0].host_bytes == 2 * microbatch


@given(layers=st.sampled_from([(0, 4), (0, 2), (2, 4), (1, 3)]), checkpointed=st.integers(0, 2), zero=st.integers(0, 3))
@settings(max_examples=examples(25))
def test_nothing_moved_is_no_offload(layers, checkpointed, zero):
    model = MemoryModel(network())
    place = slot(num_stages=3, stage_index=1, num_microbatches=4, data_parallel_degree=2)
    some = candidates(layers, checkpointed=checkpointed, zero=zero)
    plain = dataclasses.replace(some, offload=None)
    found, expected = breakdown(model, place, some)[0], breakdown(model, place, plain)[0]
    assert found == expected
    assert found.host_bytes == 0


def test_no_candidates_need_nothing():
    none = candidates(activations=0.5).take(np.empty(0, dtype=np.int64))
    needs = MemoryModel(network()).needs(slot(), none)
    assert len(needs.saved_K) == len(needs.gradients_K) == 0


def test_many_candidates_at_once_are_each_of_them_alone():
    model, place = MemoryModel(network()), slot(num_stages=2, num_microbatches=6, data_parallel_degree=2)
    rng = np.random.default_rng(0)
    count = 40
    start = rng.integers(0, 3, count)
    end = start + rng.integers(1, 5 - start)
    every = StageCandidates(
        start_K=start,
        end_K=end,
        checkpointed_K=rng.integers(0, end - start + 1),
        zero_stage_K=rng.integers(0, 4, count),
        offload=OffloadCandidates.of_kinds(rng.choice([0.0, 0.5, 1.0], (count, len(OFFLOAD_KINDS)))),
    )
    peaks, memories = model.peaks(place, every), breakdown(model, place, every)
    for index in range(count):
        alone = every.take(np.array([index]))
        assert model.peaks(place, alone) == pytest.approx(peaks[index])
        assert breakdown(model, place, alone)[0] == memories[index]
        assert memories[index].peak_bytes == pytest.approx(peaks[index], abs=5)


@pytest.mark.parametrize("kind", KINDS)
def test_moving_everything_saves_device_memory(kind):
    # Many like layers, so that two buffers are small beside what is moved.
    model, place = MemoryModel(spec(40)), slot(num_microbatches=8)
    peaks = [float(model.peaks(place, candidates((0, 40), **{kind: ratio}))[0]) for ratio in (0.0, 0.5, 1.0)]
    assert peaks[0] > peaks[1] > peaks[2]


def test_offload_is_not_what_distributed_data_parallel_does():
    # Its buckets hold all gradients from one step to the next.
    place = slot(num_microbatches=1, data_parallel_degree=2, batch_rows=4)
    model = MemoryModel(spec(40))
    some = candidates((0, 40), zero=0, gradients=1.0)
    assert model.peaks(place, some) < model.peaks(place, dataclasses.replace(some, offload=None))


def make_plan(schedule="1f1b", *, chunks=1, **ratio):
    stages = [{"layers": 4 // chunks, "offload": ratio}] * 2 * chunks
    return plan_of(8, 4, *stages, groups=2, schedule=schedule)


def test_plans_say_what_they_offload():
    uses = spec(8)
    ratio = {"optimizer": 1.0, "activations": 0.5}
    plain, moving = (stage_memory(uses, make_plan(**given)) for given in ({}, ratio))
    for before, after in zip(plain, moving, strict=True):
        assert dict(after.terms)["optimizer_bytes"] == 0
        assert dict(after.terms)["offload_bytes"] > 0
        assert before.host_bytes == 0
        assert after.host_bytes >= dict(before.terms)["optimizer_bytes"]


def test_chunks_of_one_device_share_buffers_and_add_up_in_host_memory():
    uses = spec(8)
    one = stage_memory(uses, make_plan(optimizer=1.0))
    two = stage_memory(uses, make_plan("interleaved-1f1b", chunks=2, optimizer=1.0))
    for whole, chunked in zip(one, two, strict=False):
        # Head and tail are as large as two layers: the same buffers.
        assert dict(chunked.terms)["offload_bytes"] == dict(whole.terms)["offload_bytes"]
        assert chunked.host_bytes == whole.host_bytes
    assert stage_memory(uses, make_plan("interleaved-1f1b", chunks=2))[0].host_bytes == 0
    active = stage_memory(uses, make_plan("interleaved-1f1b", chunks=2, activations=1.0))
    # Four microbatches enter the first chunk before one leaves it; the second has at most two.
    layers = active[0].host_bytes / (2 * 10_000)
    assert layers == 2 * 4 + 2 * 2
