import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.memory.memory_model import MemoryModel
from lightning_mist.cost.memory.plan_terms import need_terms, needs_of
from lightning_mist.cost.memory.stage_bytes import StageNeeds
from lightning_mist.errors import PlanError
from lightning_mist.plan import plan_of
from tests.specs import spec


def needs():
    ((slot, candidates), _) = slots_of(plan_of(4, world_size=4, global_batch_size=16, pipeline_stages=2, zero_stage=1))
    return MemoryModel(spec(4)).needs(slot, candidates)


def test_needs_come_back_from_their_terms():
    before = needs()
    again = needs_of(need_terms(before))
    for field in dataclasses.fields(StageNeeds):
        if field.name.endswith("_K"):
            assert getattr(again, field.name).tolist() == getattr(before, field.name).tolist()
    assert {name: float(value) for name, value in again.always.items()} == {
        name: float(np.asarray(value).reshape(-1)[0]) for name, value in before.always.items()
    }
    assert need_terms(again) == need_terms(before)


def test_devices_that_run_several_stages_say_what_all_hold():
    found = dict(need_terms(needs(), {"parameter_bytes": 5.0, "batch_bytes": 0.0}))
    assert found["always.parameter_bytes"] == 5.0
    assert not {"always.batch_bytes", "always.optimizer_bytes"} & set(found)


def test_an_unknown_name_is_refused():
    with pytest.raises(PlanError, match=r"needs\.saved_twice: not known; known are"):
        needs_of((("saved_twice", 1.0),))
