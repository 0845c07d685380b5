"""A ratio that moves nothing is no ratio: needs are the same to the byte, whatever the network, precision and stage."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import MemoryModel, StageCandidates, StageSlot, stage_memory
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory import OffloadParts, Ratios, device_moments
from lightning_mist.model.spec.model_spec import with_master_weights
from lightning_mist.plan import UPDATED_KINDS, OffloadRatios
from tests.cost.events import with_events
from tests.integration.parity import make_plan
from tests.specs import ADAMW, spec, with_splits
from tests.tiers import examples

KINDS = (*UPDATED_KINDS, "activations")
LOOP = dataclasses.replace(ADAMW, step_peak_bytes_per_parameter_byte=1.0, step_peak_bytes_per_largest=3.0)
NOTHING = (0.0, 1e-9)


@st.composite
def networks(draw):
    layers = draw(st.integers(1, 4))
    frozen = ("wte.weight", "blocks.0.weight", "blocks.0.bias", "head.weight")
    has_events = draw(st.booleans())
    network = spec(
        layers,
        kinds=None if has_events else draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers)),
        widths=(1000,) if has_events else (1000, 2500),
        parameter_bytes=draw(st.sampled_from([40_000, 4_012, 1_000_400])),
        edge_bytes=draw(st.sampled_from([80_000, 80_004])),
        tied=draw(st.booleans()) and not has_events,
        frozen=() if has_events else tuple(draw(st.sets(st.sampled_from(frozen), max_size=2))),
        optimizer=draw(st.sampled_from([ADAMW, LOOP])),
        precision=draw(st.sampled_from(["32-true", "16-mixed", "bf16-mixed", "bf16-true"])),
        exclusions=(("shards", "no layers"),) if draw(st.integers(0, 4)) == 0 else (),
    )
    if has_events:
        network = with_events(network)
    elif draw(st.booleans()):
        network = with_splits(network, (2, False)).split(2, False)
    if network.precision == "bf16-true" and draw(st.booleans()):
        network = with_master_weights(network)
    return network


@st.composite
def slots(draw):
    stages, degree = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return StageSlot(
        stage_index=draw(st.integers(0, stages - 1)),
        num_stages=stages,
        num_microbatches=draw(st.integers(1, 4)),
        data_parallel_degree=degree,
        rows=2,
        batch_rows=2,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])),
        shard_group=2 if degree == 4 and draw(st.booleans()) else None,
    )


def everything(slot, layers):
    """All that a stage in this place may be."""
    is_first, is_last = slot.stage_index == 0, slot.stage_index == slot.num_stages - 1
    rows = [
        (start, end, kept, zero)
        for start, end in itertools.combinations(range(layers + 1), 2)
        if not (is_first and start) and not (is_last and end < layers)
        for kept in range(end - start + 1)
        for zero in range(4)
    ]
    names = ("start_K", "end_K", "checkpointed_K", "zero_stage_K")
    return StageCandidates(**dict(zip(names, np.array(rows).T, strict=True)))


def moving(candidates, **ratios):
    offload = OffloadCandidates.of(OffloadRatios(**ratios), len(candidates))
    return dataclasses.replace(candidates, offload=offload)


def assert_same(found, wanted):
    """Needs are the same in every term, but for buffers where nothing moves."""
    for name in wanted.__slots__:
        if name.endswith("_K"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    for (what, terms), (also, others) in zip(found.update, wanted.update, strict=True):
        assert (what, list(terms)) == (also, list(others))
        for name in terms:
            assert np.array_equal(terms[name] + 0 * found.saved_K, others[name] + 0 * found.saved_K), (what, name)
    for name in {*found.always, *wanted.always}:
        ours, theirs = (np.asarray(item.always.get(name, 0.0)) + 0 * found.saved_K for item in (found, wanted))
        assert np.array_equal(ours, theirs), name


@settings(max_examples=examples(100))
@given(network=networks(), slot=slots(), data=st.data())
def test_a_ratio_that_moves_nothing_is_no_ratio(network, slot, data):
    none = {kind: data.draw(st.sampled_from(NOTHING)) for kind in KINDS}
    ratio = {data.draw(st.sampled_from(KINDS)): data.draw(st.sampled_from([0.3, 1.0]))}
    model, candidates = MemoryModel(network), everything(slot, network.num_layers)
    moments = device_moments(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
    wanted, nothing = model.needs(slot, candidates), moving(candidates, **none)
    needs = model.needs(slot, nothing)
    assert_same(needs, wanted)
    assert not needs.host_bytes(moments).any()
    # So it is beside what other candidates move, and beside another kind of state that is.
    other = moving(candidates, **ratio)
    both = model.needs(slot, StageCandidates.joined([other, nothing]))
    assert_same(both.take(slice(len(candidates), None)), wanted)
    alone = model.needs(slot, moving(candidates, **{**dict.fromkeys(KINDS, 1e-9), **ratio}))
    assert_same(alone, model.needs(slot, other))
    assert_same(both.take(slice(None, len(candidates))), alone)


@settings(max_examples=examples(60))
@given(network=networks(), slot=slots())
def test_combinations_of_ratios_that_move_nothing(network, slot):
    model, candidates = MemoryModel(network), everything(slot, network.num_layers)
    moments = device_moments(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
    ratios = dict.fromkeys(UPDATED_KINDS, (*NOTHING, 1.0))
    kept = tuple((ratio, ratio) for ratio in (*NOTHING, 1.0))
    parts = OffloadParts.of(model, slot, candidates, Ratios(**ratios, kept=kept))
    nothing = (slice(None), *[slice(0, 2)] * len(KINDS))
    wanted = model.needs(slot, candidates).peaks(moments)
    assert (parts.peaks(moments)[nothing].reshape(len(candidates), -1) == wanted[:, None]).all()
    assert not parts.host_bytes(moments)[nothing].any()
    every = model.needs(slot, moving(candidates, **dict.fromkeys(KINDS, 1.0))).peaks(moments)
    assert parts.peaks(moments)[:, -1, -1, -1, -1] == pytest.approx(every)


@settings(max_examples=examples(60))
@given(network=networks(), slot=slots(), ratio=st.sampled_from([0.3, 1.0]))
def test_moving_one_kind_of_state_leaves_the_others(network, slot, ratio):
    model, candidates = MemoryModel(network), everything(slot, network.num_layers)
    whole = model.needs(slot, candidates)
    factor = network.optimizer.gradient_bytes_per_parameter_byte
    for kind in KINDS:
        found = model.needs(slot, moving(candidates, **{kind: ratio}))
        for name, term in (("parameters", "parameter_bytes"), ("optimizer", "optimizer_bytes")):
            if name != kind:
                assert np.array_equal(found.always[term], whole.always[term])
        if kind == "gradients":
            # What stays, as the fullest rank has it, is the sums of what it had.
            assert (found.gradients_K <= whole.gradients_K).all()
            assert (found.gradients_K % factor == 0).all()
            continue
        assert np.array_equal(found.gradients_K, whole.gradients_K)
        assert np.array_equal(found.pending_K, whole.pending_K)
        for (_, terms), (_, others) in zip(found.update, whole.update, strict=True):
            assert np.array_equal(terms.get("gradient_bytes", 0.0), others.get("gradient_bytes", 0.0))
        assert (found.gradients_K >= factor * (whole.gradients_K / factor)).all()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16-true", "masters"])
def test_chunks_that_move_nothing(zero, precision):
    network = spec(8, parameter_bytes=4_012, precision="bf16-true", tied=True)
    network = with_master_weights(network) if precision == "masters" else network
    plan = make_plan([2, 2, 2, 2], chunks=2, degrees=[2, 2], parts=4, zero=zero, schedule="interleaved-1f1b", rows=16)

    def moved(**ratios):
        stages = tuple(dataclasses.replace(stage, offload=OffloadRatios(**ratios)) for stage in plan.stages)
        return stage_memory(network, dataclasses.replace(plan, stages=stages))

    wanted = moved()
    for kind in KINDS:
        assert moved(**{kind: 1e-9}) == wanted
    # Others' parameters are there as long, and gradients as large, where activations leave.
    for found, before in zip(moved(activations=0.5), wanted, strict=True):
        assert before.peak_bytes - found.peak_bytes <= 2 * found.host_bytes
        if zero < 3:
            assert dict(found.terms)["parameter_bytes"] == dict(before.terms)["parameter_bytes"]
