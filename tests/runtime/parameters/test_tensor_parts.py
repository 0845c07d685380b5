from dataclasses import replace

import pytest
import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import ParameterSplit, TensorSplit
from lightning_mist.plan.mesh import held_parameters
from lightning_mist.runtime.parameters.tensor_parts import Part, Speakers, parts_of, speakers_of
from tests.plan.test_mesh import make_map
from tests.plans import plan_of


def split_map(num_layers=2, **options):
    """The map of ``make_map``, with every second row of each layer's weight on one of two ranks."""
    splits = tuple(ParameterSplit(name=f"w{k}", dim=0, factors=((5, False), (2, True))) for k in range(num_layers))
    return replace(make_map(num_layers, **options), splits=(TensorSplit(degree=2, parameters=splits),))


def split_plan(degrees, *, zero=0, num_microbatches=4):
    """Stages of these (data-parallel, tensor-parallel) degrees, ranks in order."""
    rows = 4 * sum(dp * tp for dp, tp in degrees)
    stages = [{"data": dp, "tensor": tp, "zero": zero} for dp, tp in degrees]
    return plan_of(rows * num_microbatches, num_microbatches, *stages)


def test_a_part_is_taken_and_put_together():
    split = ParameterSplit(name="w", dim=0, factors=((5, False), (2, True)))
    whole = torch.arange(20).reshape(10, 2)
    parts = [Part(split=split, degree=2, index=index, shape=(10, 2)) for index in range(2)]
    taken = [part.take(whole) for part in parts]
    assert taken[0][:, 0].tolist() == [0, 4, 8, 12, 16]
    assert [tuple(part.shape) for part in taken] == [parts[0].local_shape] * 2 == [(5, 2)] * 2
    assert all(part.is_contiguous() for part in taken)
    assert torch.equal(parts[1].join(taken), whole)
    taken[0].zero_()
    assert whole[0, 1] == 1


def test_each_rank_has_parts_of_what_its_stage_holds():
    plan, module_map = split_plan([(2, 2), (1, 1)]), split_map()
    found = [parts_of(plan, rank, module_map) for rank in range(5)]
    assert [list(parts) for parts in found] == [["w0"]] * 4 + [[]]
    assert [parts["w0"].index for parts in found[:4]] == [0, 1, 0, 1]
    assert {parts["w0"].shape for parts in found[:4]} == {(10, 1)}
    with pytest.raises(PlanError, match="tensor_parallel_degree = 2"):
        parts_of(plan, 0, make_map(2))


def test_the_owners_of_all_parts_speak_for_a_parameter():
    plan, module_map = split_plan([(2, 2), (1, 1)], zero=1), split_map(tied=(0, 1))
    speakers = speakers_of(plan, held_parameters(plan, module_map), module_map)
    owners = {item.name: item.owners[0] for item in held_parameters(plan, module_map)}
    assert {owners["w0"], owners["tied"]} == {0, 1}
    first = 2 * owners["w0"]
    assert speakers["w0"].ranks == (first, first + 1)
    assert speakers["w0"].part is not None
    assert speakers["tied"] == Speakers(ranks=(2 * owners["tied"],), part=None)
    assert speakers["w1"] == Speakers(ranks=(4,), part=None)
    assert speakers["frozen"] == Speakers(ranks=(0,), part=None)
