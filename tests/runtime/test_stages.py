import pytest
import torch

from lightning_mist.runtime.memory_transport import InMemoryWorld
from lightning_mist.runtime.mesh import held_parameters
from lightning_mist.runtime.stages import RankStages, make_stages
from tests import zoo
from tests.integration.parity import make_plan, map_of


def stages_of(name, plan, rank):
    module, make_batch = zoo.make(name)
    module_map = map_of(module, make_batch(4))
    transport = InMemoryWorld(plan.world_size).transports[rank]
    return module, module_map, RankStages(make_stages(module, module_map, plan, rank, transport))


CHUNKS = {"layers": [1, 1, 1, 1], "chunks": 2, "schedule": "interleaved-1f1b", "checkpointed": [0, 1, 1, 0]}


def test_chunks_of_a_rank_share_one_copy_of_what_they_use():
    module, module_map, stages = stages_of("nano", make_plan(**CHUNKS), 1)
    assert [stage.index for stage in stages] == [1, 3]
    named = dict(module.named_parameters())
    assert stages.every == named
    assert all(stages.parameters[name] is named[name] for name in stages.parameters)
    assert set(stages.parameters) == {name for stage in stages for name in stage.parameters}
    held = {item.name for item in held_parameters(make_plan(**CHUNKS), module_map) if 1 in item.stages}
    assert set(stages.parameters) == held
    assert not set(stages.parameters) & set(stages.foreign)


def test_chunks_are_attached_one_at_a_time_and_a_single_stage_throughout():
    module, _, stages = stages_of("plain", make_plan(**CHUNKS), 0)
    before = [dict(vars(block)) for block in module.blocks]
    with stages.attached():
        assert [dict(vars(block)) for block in module.blocks] == before
        with stages.at(2) as stage:
            assert stage is stages[2]
            assert [dict(vars(block)) for block in module.blocks] != before
        with stages.at(0):
            pass
    assert [dict(vars(block)) for block in module.blocks] == before
    module, _, stages = stages_of("plain", make_plan([2, 2]), 0)
    with stages.attached():
        attached = [dict(vars(block)) for block in module.blocks]
        with stages.at(0):
            assert [dict(vars(block)) for block in module.blocks] == attached
        with pytest.raises(RuntimeError, match="stage 0 is attached already"), stages[0].attached():
            pass


def test_only_what_no_chunk_uses_is_hollowed():
    _, _, stages = stages_of("plain", make_plan(**CHUNKS), 0)
    stages.hollow()
    assert all(bool(torch.isfinite(parameter).all()) for parameter in stages.parameters.values())
    assert all(bool(parameter.isnan().all()) for parameter in stages.foreign.values())
