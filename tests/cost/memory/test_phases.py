import pytest

from lightning_mist.cost.memory.phases import _phases_of_stages, phases_in_order, stage_phases
from lightning_mist.schedule import arrived_sends, generate
from lightning_mist.schedule.lowering import add_transfers
from tests.schedule.in_flight import in_flight


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7, 40])
def test_in_flight_is_that_of_the_whole_schedule(stages, microbatches, schedule):
    lists = generate(stages, microbatches, schedule)
    for index in range(stages):
        phases = stage_phases(index, stages, microbatches, schedule)
        most = max(phase.others + (phase.kind != "transfer") for phase in phases)
        assert most == in_flight(lists, index)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9, 16])
def test_they_are_those_of_the_whole_schedule(stages, microbatches):
    lists = add_transfers(generate(stages, microbatches, "1f1b"))
    for index, (actions, arrivals) in enumerate(zip(lists, arrived_sends(lists), strict=True)):
        found = {phase for _, phase in phases_in_order(actions, sends_gradients=index > 0, arrivals=arrivals)}
        most = {phase for phase in found if not any(other.dominates(phase) for other in found - {phase})}
        assert set(stage_phases(index, stages, microbatches)) == most


def test_one_microbatch_never_meets_gradients():
    phases = stage_phases(0, 1, 1)
    assert [(phase.kind, phase.gradients, phase.others) for phase in phases] == [
        ("forward", False, 0),
        ("first backward", False, 0),
    ]


def test_accumulation_meets_gradients():
    found = {(phase.kind, phase.gradients, phase.others) for phase in stage_phases(0, 1, 4)}
    assert found == {("forward", True, 0), ("first backward", False, 0), ("backward", True, 0)}


def test_what_is_received_and_sent_counts():
    first, last = stage_phases(0, 2, 8), stage_phases(1, 2, 8)
    assert {phase.received for phase in first} == {0}
    assert {phase.sent_gradients for phase in first} == {0}
    assert {phase.received_gradients for phase in last} == {0}
    # While the last stage computes backward, the next activation is on its way, and the gradient before is being sent.
    backward = next(phase for phase in last if phase.kind == "backward")
    assert (backward.received, backward.sent_gradients) == (2, 1)


def test_a_stage_keeps_fewer_microbatches_than_there_are_when_they_run_out():
    assert max(phase.others for phase in stage_phases(0, 4, 2) if phase.kind != "transfer") == 1


def test_no_situation_dominates_another():
    for index in range(4):
        phases = stage_phases(index, 4, 16)
        assert not any(a.dominates(b) for a in phases for b in phases if a != b)


def test_outputs_that_are_being_sent_are_counted_until_they_have_arrived():
    # The last stage of GPipe sends no output; the first has all on their way until the first gradient comes back.
    forwards = [phase for phase in stage_phases(0, 2, 4, "gpipe") if phase.kind == "forward"]
    assert max(phase.sent_activations for phase in forwards) == 3
    # While it waits for that, it has all four and no computation's temporaries.
    (waits,) = [phase for phase in stage_phases(0, 2, 4, "gpipe") if phase.kind == "transfer"]
    assert (waits.others, waits.sent_activations, waits.gradients) == (4, 4, False)
    backwards = [phase for phase in stage_phases(0, 2, 4, "gpipe") if phase.kind.endswith("backward")]
    assert all(phase.sent_activations == 0 for phase in backwards)
    assert all(phase.sent_activations == 0 for phase in stage_phases(1, 2, 4, "gpipe"))


def test_an_input_backward_that_makes_gradients_is_a_situation_of_its_own():
    # Under ZeRO-2 all that it makes may be more than the part that stays, which is what later ones find.
    inputs = {phase.gradients for phase in stage_phases(0, 2, 8, "zb-h1") if phase.kind == "input backward"}
    assert inputs == {False, True}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 20])
def test_the_last_stage_of_zero_bubble_is_the_same_without_the_first_ones(stages, microbatches):
    shown = min(microbatches, 2 * stages + 1)
    assert stage_phases(stages - 1, stages, microbatches, "zb-h1") == _phases_of_stages(stages, shown, "zb-h1")[-1]
