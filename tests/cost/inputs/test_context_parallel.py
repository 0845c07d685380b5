import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates, StageSlot, stage_memory
from lightning_mist.cost.inputs.regions import KEY_VALUE_STATES, part_of_sequence
from lightning_mist.errors import PlanError
from lightning_mist.model.spec.model_spec import LayerSpec
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from lightning_mist.plan import Plan, StageMesh, StagePlan, TensorSplit, ZeroStage
from tests.specs import spec


def sequences(layers=4, length=8):
    """A network whose bytes per row are bytes per token."""
    uses = spec(layers)
    longer = {MICROBATCH: MICROBATCH * SEQUENCE}

    def part(item):
        names = [field.name for field in dataclasses.fields(LayerSpec) if field.name.endswith("_bytes")]
        return dataclasses.replace(item, **{name: getattr(item, name).subs(longer) for name in names})

    def tensor(item):
        return dataclasses.replace(item, shape=(*item.shape, SEQUENCE))

    return dataclasses.replace(
        uses,
        head=part(uses.head),
        layers=tuple(map(part, uses.layers)),
        tail=part(uses.tail),
        boundaries=tuple(tuple(map(tensor, cut)) for cut in uses.boundaries),
        batch_bytes=uses.batch_bytes * SEQUENCE,
        sequence_length=length,
    )


def make_plan(context, *, data=1, zero=0, microbatches=2):
    devices = tuple(range(context * data))
    mesh = StageMesh(devices=devices, data_parallel_degree=data, context_parallel_degree=context)
    stage = StagePlan(layers=(0, 4), mesh=mesh, microbatch_size=4 // data, zero_stage=ZeroStage(zero))
    return Plan(global_batch_size=4 * microbatches, num_microbatches=microbatches, stages=(stage,))


def test_costs_are_those_of_a_part_of_the_sequence_and_of_all_keys():
    uses = sequences()
    all_tokens, half = MemoryModel(uses).costs(4), MemoryModel(dataclasses.replace(uses, sequence_length=4)).costs(4)
    part = MemoryModel(uses).costs(4, 2)
    # 4 rows of 8 tokens hand on 1000 bytes each; keys and values are two of that, of which one is kept anyway.
    keys = KEY_VALUE_STATES * 4 * 8 * 1000
    for name, more in (
        ("saved", keys / 2),
        ("checkpointed_saved", 0.0),
        ("forward_peak", keys),
        ("recompute_forward_peak", keys),
        ("backward_peak", 1.5 * keys),
        ("first_backward_peak", 1.5 * keys),
        ("recompute_backward_peak", 2 * keys),
    ):
        found_R, half_R, all_R = (getattr(costs, f"{name}_R") for costs in (part, half, all_tokens))
        assert found_R.tolist() == [all_R[0], *(half_R[1:-1] + more), half_R[-1]]
    assert part.batch_bytes == all_tokens.batch_bytes


def test_a_tail_that_puts_tokens_together_is_of_all_of_them():
    uses = sequences()
    split = TensorSplit(degree=2, parameters=(), notes=("the tail puts all tokens together",))
    gathering = dataclasses.replace(uses, module_map=dataclasses.replace(uses.module_map, contexts=(split,)))
    found = MemoryModel(gathering).costs(4, 2).forward_peak_R[-1]
    assert found == MemoryModel(uses).costs(4).forward_peak_R[-1] > MemoryModel(uses).costs(4, 2).forward_peak_R[-1]


def test_the_terms_of_a_stage():
    uses = sequences()
    alone, shared = (dict(stage_memory(uses, make_plan(context))[0].terms) for context in (1, 2))
    # Every device has all parameters, and computes on half of the tokens of the same rows.
    assert alone["parameter_bytes"] == shared["parameter_bytes"]
    assert alone["optimizer_bytes"] == shared["optimizer_bytes"]
    assert alone["batch_bytes"] == 16 * 8 * 8
    assert shared["batch_bytes"] == 2 * 16 * 4 * 8
    assert shared["working_bytes"] < alone["working_bytes"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_are_of_data_and_context_parallel_ranks(zero):
    uses = sequences()
    data = dict(stage_memory(uses, make_plan(1, data=4, zero=zero))[0].terms)
    for both in (make_plan(4, zero=zero), make_plan(2, data=2, zero=zero)):
        found = dict(stage_memory(uses, both)[0].terms)
        for term in ("parameter_bytes", "optimizer_bytes"):
            assert found[term] == data[term]


def test_ranks_that_share_a_sequence_are_not_what_distributed_data_parallel_has():
    uses, some = sequences(), np.array([0])
    every = StageCandidates(start_K=some, end_K=some + 4, checkpointed_K=some, zero_stage_K=some)
    place = {"stage_index": 0, "num_stages": 1, "num_microbatches": 1, "rows": 4, "batch_rows": 4}
    model = MemoryModel(uses)
    plain = model.needs(StageSlot(**place, data_parallel_degree=2), every)
    shared = model.needs(StageSlot(**place, data_parallel_degree=1, context_parallel_degree=2), every)
    # Buckets that are there from the start.
    assert plain.forward_K - shared.forward_K > plain.gradients_K / 2
    assert dict(shared.update)["gradient reduction"]["working_bytes"] > 0


def test_what_cannot_be_shared_out():
    assert part_of_sequence(sequences(), 4) == 2
    assert part_of_sequence(spec(2), 1) is None
    with pytest.raises(PlanError, match="context_parallel_degree = 3: it must divide the sequence length 8; use 2"):
        stage_memory(sequences(), make_plan(3))
    with pytest.raises(PlanError, match="synthetic was traced without a sequence dimension"):
        stage_memory(spec(4), make_plan(2))
