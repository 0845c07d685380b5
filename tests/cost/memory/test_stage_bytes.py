"""What stages need around each computation, added up by hand and by the two ways that must agree."""

from dataclasses import fields

import numpy as np
import pytest

from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.memory import MemoryModel, device_memory
from lightning_mist.cost.memory.moments import COUNTED, Moment, device_moments
from lightning_mist.cost.memory.stage_bytes import PeakParts, StageNeeds, need_terms, needs_of, parts_of, terms_at
from lightning_mist.errors import PlanError
from lightning_mist.plan import plan_of
from tests.specs import spec

COUNT = 4
ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))


def make(seed=0):
    random = np.random.default_rng(seed)
    arrays = {name: random.integers(0, 1000, COUNT).astype(float) for name in ARRAYS}
    always = {"parameter_bytes": random.integers(0, 1000, COUNT).astype(float), "buffer_bytes": 7.0}
    update = (("update", {"optimizer_bytes": random.integers(0, 9000, COUNT).astype(float), "working_bytes": 3.0}),)
    return StageNeeds(always=always, update=update, **arrays)


def at(kind, **counts):
    """Counts of some things, all others being none."""
    return Moment(kind, tuple(counts.get(name, 0) for name in COUNTED))


def test_terms_are_what_is_counted_by_term():
    needs = make()
    found = terms_at(
        at("forward", saved=2, entering=3, returned=1, forward=1, gradients=1, under_way=1), parts_of([needs])
    )
    assert {name: value.tolist() for name, value in found.items()} == {
        "gradient_bytes": (needs.gradients_K + needs.pending_K).tolist(),
        "activation_bytes": (2 * needs.saved_K).tolist(),
        "transfer_bytes": (3 * needs.entering_K + needs.returned_K).tolist(),
        "working_bytes": needs.forward_K.tolist(),
    }


def test_of_several_stages_the_most_that_those_behind_may_have_under_way_counts():
    first, second = make(1), make(2)
    moment = Moment("forward", (*at("", under_way=1, saved=1).counts, *at("", saved=2).counts))
    found = terms_at(moment, parts_of([first, second]))
    assert found["gradient_bytes"].tolist() == np.maximum(first.pending_K, second.pending_K).tolist()
    assert found["activation_bytes"].tolist() == (first.saved_K + 2 * second.saved_K).tolist()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_peak_is_that_of_the_largest_moment_or_update(stage, schedule):
    for seed in range(5):
        needs, moments = make(seed), device_moments(stage, 4, 6, schedule)
        of_moments = [(moment.kind, terms_at(moment, parts_of([needs]))) for moment in moments]
        every = [(name, sum({**needs.always, **terms}.values())) for name, terms in (*of_moments, *needs.update)]
        np.testing.assert_array_equal(needs.peaks(moments), np.max([total_K for _, total_K in every], axis=0))
        found = device_memory([needs], needs.always, needs.update, moments, np.zeros(COUNT))
        for index, memory in enumerate(found):
            name, total_K = max(every, key=lambda item: item[1][index])
            assert (memory.phase, memory.peak_bytes) == (name, total_K[index])


def test_parts_of_several_slots_are_joined_and_taken():
    moments = device_moments(0, 2, 4, "1f1b")
    parts = [PeakParts.of(make(seed)) for seed in range(3)]
    joined = PeakParts.joined(parts)
    assert len(joined) == sum(map(len, parts))
    wanted = np.concatenate([part.peaks(moments) for part in parts])
    np.testing.assert_array_equal(joined.peaks(moments), wanted)
    np.testing.assert_array_equal(joined.take(slice(4)).peaks(moments), wanted[:4])
    np.testing.assert_array_equal(joined.take(np.array([5, 1])).peaks(moments), wanted[[5, 1]])
    assert len(PeakParts.none().peaks(moments)) == 0


def needs():
    ((slot, candidates), _) = slots_of(plan_of(4, world_size=4, global_batch_size=16, pipeline_stages=2, zero_stage=1))
    return MemoryModel(spec(4)).needs(slot, candidates)


def test_needs_come_back_from_their_terms():
    before = needs()
    again = needs_of(need_terms(before))
    for field in fields(StageNeeds):
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
