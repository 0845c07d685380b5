from dataclasses import replace

import pytest
import torch

from lightning_mist.plan import ParameterSplit, SequenceSplit, TensorSplit
from lightning_mist.runtime.stage.pipeline_stage import RankStages, make_stages
from tests import zoo
from tests.integration.parity import make_plan, map_of
from tests.memory_transport import InMemoryWorld


@pytest.fixture(scope="module")
def plain():
    module, make_batch = zoo.make("plain")
    return module, map_of(module, make_batch(4))


def test_chunks_of_a_rank_share_one_module_and_hold_each_parameter_once(plain):
    module, module_map = plain
    plan = make_plan([1, 1, 1, 1], chunks=2, schedule="interleaved-1f1b", parts=2)
    stages = RankStages(make_stages(module, module_map, plan, 1, InMemoryWorld(2).transports[1]))
    assert [stage.index for stage in stages] == [1, 3]
    held = {**stages[1].parameters, **stages[3].parameters}
    assert stages.parameters.keys() == held.keys()
    assert stages.parameters.keys() | stages.foreign.keys() == dict(module.named_parameters()).keys()
    assert not stages.parameters.keys() & stages.foreign.keys()
    assert all(stages.every[name] is parameter for name, parameter in module.named_parameters())
    stages.free_foreign()
    assert all(torch.isnan(parameter).all() for parameter in stages.foreign.values())
    assert not any(torch.isnan(parameter).any() for parameter in stages.parameters.values())


def test_a_single_stage_stays_attached_and_chunks_take_turns(plain):
    module, module_map = plain
    single = RankStages(make_stages(module, module_map, make_plan([2, 2]), 0, InMemoryWorld(2).transports[0]))
    with single.attached(), single.at(0), single.at(0) as stage:
        assert stage is single[0]
    plan = make_plan([1, 1, 1, 1], chunks=2, schedule="interleaved-1f1b", parts=2)
    several = RankStages(make_stages(module, module_map, plan, 0, InMemoryWorld(2).transports[0]))
    with several.attached():
        with several.at(2) as stage:
            assert stage is several[2]
        with several.at(0) as stage:
            assert stage is several[0]


def test_stages_of_tensor_parallel_ranks_know_their_peers(plain):
    module, module_map = plain
    name = module_map.parameters[0].name
    split = TensorSplit(
        degree=2,
        parameters=(ParameterSplit(name=name, dim=0, factors=((module_map.parameters[0].shape[0], True),)),),
        sequence=(SequenceSplit(position=0, leaf=0, dim=1),),
    )
    module_map = replace(module_map, splits=(split,))
    plan = make_plan([2, 2], tensor=[1, 2], degrees=[1, 1], sequence=[False, True])
    whole = make_stages(module, module_map, plan, 0, InMemoryWorld(3).transports[0])
    assert [stage.split for stage in whole] == [None]
    (stage,) = make_stages(module, module_map, plan, 2, InMemoryWorld(3).transports[2])
    context = stage.split.context
    assert (context.rank, context.degree, context.sequence_parallel) == (1, 2, True)
