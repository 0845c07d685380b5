from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import PlanError, ScheduleError
from lightning_mist.plan import Predicted, PredictedStage
from lightning_mist.schedule import generate
from lightning_mist.schedule.action import SENDS
from lightning_mist.schedule.lowering import add_transfers, add_update
from lightning_mist.schedule.schedule_simulation import ActionSeconds, simulate, simulate_plan
from tests.plans import plan_of
from tests.schedule.in_flight import in_flight_counts
from tests.schedule.text import parse

seconds = st.integers(0, 50).map(float)
stage_seconds = st.builds(ActionSeconds, forward=seconds, backward=seconds)
names = st.sampled_from(["1f1b", "gpipe"])


def closed_form(stages, num_microbatches):
    total = [stage.forward + stage.backward for stage in stages]
    return (num_microbatches - 1) * max(total) + sum(total)


def lower_bound(stages, num_microbatches):
    """No stage begins before the stages before it have passed one microbatch on, nor is it done before they are."""
    total = [stage.forward + stage.backward for stage in stages]
    return max(num_microbatches * t + sum(total[:i]) for i, t in enumerate(total))


@given(st.integers(1, 7), st.integers(1, 12), seconds, seconds, names)
def test_uniform_stages_take_the_closed_form_exactly(num_stages, num_microbatches, forward, backward, name):
    stages = [ActionSeconds(forward=forward, backward=backward)] * num_stages
    result = simulate(generate(num_stages, num_microbatches, name), stages)
    assert result.makespan == closed_form(stages, num_microbatches)


@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=6), st.integers(1, 12), st.integers(0, 4))
def test_uneven_1f1b_with_one_ratio_lies_between_lower_bound_and_closed_form(forwards, num_microbatches, ratio):
    stages = [ActionSeconds(forward=forward, backward=ratio * forward) for forward in forwards]
    makespan = simulate(generate(len(stages), num_microbatches), stages).makespan
    assert lower_bound(stages, num_microbatches) <= makespan <= closed_form(stages, num_microbatches)


@given(st.lists(stage_seconds, min_size=1, max_size=6), st.integers(1, 12), names)
def test_any_stages_lie_between_the_lower_bound_and_the_closed_form_of_each_direction(stages, num_microbatches, name):
    makespan = simulate(generate(len(stages), num_microbatches, name), stages).makespan
    slowest = max(stage.forward for stage in stages) + max(stage.backward for stage in stages)
    upper = (num_microbatches - 1) * slowest + sum(stage.forward + stage.backward for stage in stages)
    assert lower_bound(stages, num_microbatches) <= makespan <= upper


def test_closed_form_is_too_short_where_one_stage_is_slow_forward_and_another_backward():
    stages = [
        ActionSeconds(forward=0, backward=1),
        ActionSeconds(forward=1, backward=0),
        ActionSeconds(forward=0, backward=0),
    ]
    assert closed_form(stages, 2) == 3
    assert simulate(generate(3, 2), stages).makespan == 4


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), seconds, seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(num_groups, chunks, rounds, forward, backward):
    """Narayanan et al., 2021, section 2.2.2: the bubble is (P - 1) (F + B) / V with a device's whole F and B."""
    num_microbatches = rounds * num_groups
    chunk = ActionSeconds(forward=forward, backward=backward)
    schedule = generate(num_groups * chunks, num_microbatches, "interleaved-1f1b", num_groups=num_groups)
    result = simulate(schedule, [chunk] * (num_groups * chunks))
    assert result.makespan == (num_microbatches * chunks + num_groups - 1) * (forward + backward)
    assert result.bubble == ((num_groups - 1) * (forward + backward),) * num_groups
    whole = ActionSeconds(forward=chunks * forward, backward=chunks * backward)
    assert result.makespan <= simulate(generate(num_groups, num_microbatches), [whole] * num_groups).makespan


@given(st.integers(2, 7), st.integers(0, 8), st.integers(1, 9).map(float))
def test_zero_bubble_has_the_bubble_of_its_paper(num_stages, more, unit):
    """Qi et al., 2023, table 1: (S - 1) (F + B + W) under 1F1B, (S - 1) (F + B - W) under ZB-H1."""
    stages = [ActionSeconds(forward=unit, backward=2 * unit, weight=unit)] * num_stages
    num_microbatches = num_stages + more
    whole = simulate(generate(num_stages, num_microbatches), stages)
    split = simulate(generate(num_stages, num_microbatches, "zb-h1"), stages)
    assert set(whole.bubble) == {(num_stages - 1) * 3 * unit}
    assert set(split.bubble) == {(num_stages - 1) * unit}


@given(st.integers(2, 6), st.integers(1, 12), seconds, seconds, st.integers(1, 50).map(float))
def test_zero_bubble_is_faster_than_1f1b_on_equal_stages(num_stages, num_microbatches, forward, inputs, weights):
    stages = [ActionSeconds(forward=forward, backward=inputs + weights, weight=weights)] * num_stages
    split = simulate(generate(num_stages, num_microbatches, "zb-h1"), stages)
    whole = simulate(generate(num_stages, num_microbatches), stages)
    assert split.makespan < whole.makespan
    assert split.busy == whole.busy


def test_transfers_between_two_groups_of_chunks_share_one_link_in_each_direction():
    schedule = add_transfers(generate(4, 2, "interleaved-1f1b", num_groups=2))
    result = simulate(
        schedule,
        [ActionSeconds(forward=1, backward=1)] * 4,
        activation_seconds=[3, 3, 3],
        gradient_seconds=[2, 2, 2],
    )
    for line, kept in ((result.spans[0], SENDS), (result.spans[1], SENDS)):
        moved = sorted((span.start, span.end) for span in line if span.action.kind in kept)
        assert all(first[1] <= second[0] for first, second in pairwise(moved))
    assert {span.rank for span in result.spans[0]} == {0}
    assert result.makespan > simulate(schedule, [ActionSeconds(forward=1, backward=1)] * 4).makespan


@given(st.lists(stage_seconds, min_size=1, max_size=5), st.integers(1, 8), names, st.data())
def test_transfers_without_time_change_nothing_and_with_time_never_help(stages, num_microbatches, name, data):
    computations = generate(len(stages), num_microbatches, name)
    boundary = st.lists(seconds, min_size=len(stages) - 1, max_size=len(stages) - 1)
    bare = simulate(computations, stages)
    free = simulate(add_transfers(computations), stages)
    slow = simulate(
        add_transfers(computations),
        stages,
        activation_seconds=data.draw(boundary),
        gradient_seconds=data.draw(boundary),
    )
    assert bare.makespan == free.makespan <= slow.makespan
    assert bare.busy == free.busy == slow.busy == tuple(num_microbatches * (s.forward + s.backward) for s in stages)
    for actions, result in zip(computations, slow.in_flight, strict=True):
        assert max(count for _, count in result) == max(in_flight_counts(actions))
        assert result[-1][1] == 0


def test_two_stages_by_hand():
    stages = [ActionSeconds(forward=1, backward=2), ActionSeconds(forward=3, backward=4)]
    result = simulate(generate(2, 2), stages)
    assert [[(str(s.action), s.start, s.end) for s in line] for line in result.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 8, 10), ("0B1", 15, 17)],
        [("1F0", 1, 4), ("1B0", 4, 8), ("1F1", 8, 11), ("1B1", 11, 15)],
    ]
    assert (result.makespan, result.busy, result.bubble) == (17, (6, 14), (11, 3))
    assert result.in_flight[0] == ((0, 1), (1, 2), (10, 1), (17, 0))


def test_transfer_waits_for_both_sides_and_for_the_one_before_it():
    schedule = add_transfers(parse("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"))
    stages = [ActionSeconds(forward=1, backward=1), ActionSeconds(forward=1, backward=1)]
    result = simulate(schedule, stages, activation_seconds=[5], gradient_seconds=[2])
    spans = {str(span.action): (span.start, span.end) for line in result.spans for span in line}
    assert spans["0SEND_F0"] == spans["1RECV_F0"] == (1, 6)
    assert spans["0SEND_F1"] == spans["1RECV_F1"] == (6, 11)  # sent at 2, the link is busy until 6
    assert spans["1F1"] == (11, 12)
    assert spans["1SEND_B0"] == (13, 15)
    assert spans["1SEND_B1"] == spans["0RECV_B1"] == (15, 17)  # sent at 14; received only from 0B0's start at 15
    assert spans["0B1"] == (17, 18)
    assert result.makespan == 18


def test_update_hides_in_the_drain_of_earlier_stages():
    schedule = add_update(add_transfers(generate(2, 1)), tied=False, gathers=[False, True])
    stages = [
        ActionSeconds(forward=1, backward=2, step=0.5),
        ActionSeconds(forward=1, backward=2, reduce=0.5, step=0.25, gather=1),
    ]
    result = simulate(schedule, stages)
    assert result.makespan == 6.5
    assert result.spans[1][-1].end == 5.75


def test_tied_gradients_are_summed_when_the_last_stage_is_there():
    schedule = add_update(add_transfers(generate(2, 1)), tied=True, gathers=[False, False])
    stages = [ActionSeconds(forward=1, backward=1, reduce_tied=1), ActionSeconds(forward=1, backward=1, reduce_tied=3)]
    result = simulate(schedule, stages)
    ends = [[span.end for span in line if str(span.action).endswith("TIED")] for line in result.spans]
    assert ends == [[7.0], [7.0]]


def test_the_first_microbatch_may_differ():
    stage = ActionSeconds(forward=1, backward=1, first_forward=4, first_backward=6)
    assert simulate(generate(1, 3), [stage]).makespan == 4 + 6 + 1 + 1 + 1 + 1


def predicted_plan(terms):
    predicted = [
        PredictedStage(
            steady_seconds=3,
            boundary_seconds=5,
            forward_seconds=1,
            backward_seconds=2,
            peak_bytes=0,
            breakdown=tuple(term.items()),
        )
        for term in terms
    ]
    return plan_of(3, 3, {}, {}, {}, predicted=Predicted(step_seconds=15, stages=tuple(predicted)))


def seconds_of(result):
    return {str(span.action): span.end - span.start for line in result.spans for span in line}


def test_a_plan_runs_with_its_predicted_seconds():
    result = simulate_plan(predicted_plan([{}, {}, {}]))
    assert result.makespan == 15 + 5
    assert seconds_of(result)["2STEP"] == 5
    split = seconds_of(simulate_plan(replace(predicted_plan([{}, {}, {"weight_seconds": 0.5}]), schedule="zb-h1")))
    assert [split[name] for name in ("1I0", "1W0", "2I0", "2W0")] == [1, 1, 1.5, 0.5]
    assert "0REDUCE_TIED" not in seconds_of(result)


def test_no_clock_is_run_for_hours():
    plan = predicted_plan([{}, {}, {}])
    many = 10**6 * plan.num_microbatches
    long = replace(plan, num_microbatches=many, global_batch_size=plan.global_batch_size * 10**6)
    with pytest.raises(
        PlanError, match=f"{many:,} microbatches on 3 stages: .* at most of 4,000,000; look at a plan of"
    ):
        simulate_plan(long)


def test_a_plan_runs_with_the_terms_of_its_prediction():
    terms = [
        {"transfer_seconds": 0.5, "reduce_seconds": 1, "tied_seconds": 2, "update_seconds": 3, "gather_seconds": 4},
        {"transfer_seconds": 0.5},
        {"transfer_seconds": 0.25},
    ]
    seconds = seconds_of(simulate_plan(predicted_plan(terms)))
    assert [seconds[name] for name in ("0REDUCE", "0REDUCE_TIED", "0STEP", "1STEP")] == [1, 2, 3, 5]
    names = ("0SEND_F0", "1SEND_B0", "1SEND_F0", "2SEND_B0")
    assert [seconds[name] for name in names] == [0.25, 0.5, 0.25, 0.25]


def test_predictions_without_terms_of_sending_send_as_long_as_they_receive():
    def makespan(*terms):
        plan = predicted_plan(terms)
        return simulate_plan(replace(plan, predicted=replace(plan.predicted, transfers="within"))).makespan

    received = [{"arrival_seconds": 0.0, "return_seconds": 4}, {"arrival_seconds": 2, "return_seconds": 8}]
    received.append({"arrival_seconds": 1, "return_seconds": 0.0})
    sent = [{"send_seconds": 2}, {"send_seconds": 1, "send_back_seconds": 4}, {"send_back_seconds": 8}]
    both = [{**one, **other} for one, other in zip(received, sent, strict=True)]
    assert makespan(*received) == makespan(*both) > 20
    both[2]["send_back_seconds"] = 16
    assert makespan(*both) >= makespan(*received) + 8


def test_a_group_does_once_per_batch_what_its_chunks_are_predicted():
    found = predicted_plan([{"update_seconds": 1}, {}, {"update_seconds": 2}]).predicted.stages
    predicted = Predicted(step_seconds=1, stages=(*found, found[1]))
    plan = plan_of(2, 2, *[{}] * 4, groups=2, schedule="interleaved-1f1b", predicted=predicted)
    seconds = seconds_of(simulate_plan(plan))
    assert {name: value for name, value in seconds.items() if name.endswith("STEP")} == {"0STEP": 3, "1STEP": 10}


def test_a_plan_without_predictions_is_refused():
    with pytest.raises(PlanError, match="the plan has no predicted seconds: a simulation needs those of every stage"):
        simulate_plan(replace(predicted_plan([{}, {}, {}]), predicted=None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": []}, "stages has 0 entries: a schedule of 2 stages needs 2"),
        ({"activation_seconds": [1, 2]}, "activation_seconds has 2 entries: a schedule of 2 stages needs 1"),
        ({"gradient_seconds": [1, 2]}, "gradient_seconds has 2 entries: a schedule of 2 stages needs 1"),
        ({"stages": [ActionSeconds(forward=-1, backward=0)] * 2}, "0F0 takes -1.0 seconds: times are finite"),
        ({"sent_activation_seconds": [1, 2]}, "sent_activation_seconds has 2 entries: a schedule of 2 stages needs 1"),
        ({"sent_gradient_seconds": [1, 2]}, "sent_gradient_seconds has 2 entries: a schedule of 2 stages needs 1"),
        ({"gradient_seconds": [float("nan")]}, "0RECV_B0 takes nan seconds"),
        ({"sent_gradient_seconds": [-1]}, "1SEND_B0 takes -1 seconds"),
    ],
)
def test_wrong_times_are_refused(arguments, message):
    stages = arguments.pop("stages", [ActionSeconds(forward=1, backward=1)] * 2)
    with pytest.raises(ValueError, match=message):
        simulate(add_transfers(generate(2, 2)), stages, **arguments)


def test_a_broken_schedule_is_refused():
    stages = [ActionSeconds(forward=1, backward=1)] * 2
    with pytest.raises(ScheduleError, match="for ever"):
        simulate(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), stages)
