"""What stages need around each computation, added up by hand and by the two ways that must agree."""

from dataclasses import fields, replace

import numpy as np
import pytest

from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.memory.memory_model import MemoryModel
from lightning_mist.cost.memory.phases import Phase, stage_phases
from lightning_mist.cost.memory.stage_bytes import PeakParts, StageNeeds, need_terms, needs_of
from lightning_mist.errors import PlanError
from lightning_mist.plan import plan_of
from tests.specs import spec

COUNT = 4
ARRAYS = tuple(name for name in StageNeeds.__slots__ if name.endswith("_K"))
FORWARD = Phase(
    kind="forward", gradients=False, others=2, waiting=0, received=3, received_gradients=0, sent_gradients=1
)


def make(seed=0):
    random = np.random.default_rng(seed)
    arrays = {name: random.integers(0, 1000, COUNT).astype(float) for name in ARRAYS}
    always = {"weight_bytes": random.integers(0, 1000, COUNT).astype(float), "buffer_bytes": 7.0}
    update = (("update", {"optimizer_bytes": random.integers(0, 9000, COUNT).astype(float), "other_bytes": 3.0}),)
    return StageNeeds(always=always, update=update, **arrays)


def terms(phase):
    """What a situation consists of for the first candidate, ``always`` aside."""
    ((_, found), _) = make().situations([phase])
    return {name: value[0] for name, value in found.items() if name not in ("weight_bytes", "buffer_bytes")}


def test_a_forward_stands_beside_other_microbatches_and_their_transfers():
    needs = make()
    expected = {
        "gradient_bytes": 0.0,
        "activation_bytes": 2 * needs.saved_K[0],
        "transfer_bytes": 3 * needs.entering_K[0] + needs.returned_K[0],
        "working_bytes": needs.forward_K[0],
    }
    assert terms(FORWARD) == expected
    # Behind the first backward there are gradients, and some that are still being reduced.
    later = terms(replace(FORWARD, gradients=True))
    assert later == {**expected, "gradient_bytes": needs.gradients_K[0] + needs.pending_K[0]}


def test_a_later_backward_has_all_gradients_and_reused_ones_twice():
    needs = make()
    found = terms(replace(FORWARD, kind="backward", gradients=True, received_gradients=2))
    assert found["gradient_bytes"] == needs.gradients_K[0] + needs.reused_K[0]
    assert found["working_bytes"] == needs.backward_K[0]
    # Of two received gradients the one at hand stands where the output was.
    assert found["transfer_bytes"] == 3 * needs.entering_K[0] + needs.leaving_K[0] + needs.returned_K[0]


def test_weight_gradients_keep_what_waits_for_them():
    needs = make()
    found = terms(replace(FORWARD, kind="weight backward", gradients=True, waiting=2))
    assert found["activation_bytes"] == 2 * needs.saved_K[0] + 2 * needs.waiting_K[0]
    assert found["working_bytes"] == needs.weight_backward_K[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_peak_is_the_largest_situation(stage, schedule, seed):
    needs, phases = make(seed), stage_phases(stage, 4, 6, schedule)
    totals = [sum(found.values()) for _, found in needs.situations(phases)]
    assert len(totals) == len(phases) + 1
    np.testing.assert_array_equal(needs.peaks(phases), np.max(totals, axis=0))
    # Among those that come near the most is the first that reaches it, of every candidate.
    nearest = needs.nearest(phases)
    near = [sum(found.values()) for _, found in nearest]
    assert len(near) < len(totals)
    for index in range(COUNT):
        name, _ = needs.situations(phases)[int(np.argmax([total[index] for total in totals]))]
        assert name == nearest[int(np.argmax([total[index] for total in near]))][0]
        assert max(total[index] for total in near) == max(total[index] for total in totals)


def test_parts_of_several_slots_are_joined_and_taken():
    phases = stage_phases(0, 2, 4, "1f1b")
    parts = [PeakParts.of(make(seed)) for seed in range(3)]
    joined = PeakParts.joined(parts)
    assert len(joined) == sum(map(len, parts))
    wanted = np.concatenate([part.peaks(phases) for part in parts])
    np.testing.assert_array_equal(joined.peaks(phases), wanted)
    np.testing.assert_array_equal(joined.take(slice(4)).peaks(phases), wanted[:4])
    np.testing.assert_array_equal(joined.take(np.array([5, 1])).peaks(phases), wanted[[5, 1]])
    assert len(PeakParts.none().peaks(phases)) == 0


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
