from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ScheduleError
from lightning_mist.plan import Plan, StageMesh, ZeroStage
from lightning_mist.schedule import check, generate, lower, lower_forwards
from lightning_mist.schedule.action import COMPUTATIONS, RECEIVES, SENDS, ActionKind
from lightning_mist.schedule.lowering import add_transfers, add_update
from tests.plans import plan_of, plans
from tests.schedule.in_flight import in_flight
from tests.schedule.text import lines, parse, show


def make_plan(num_stages: int, num_microbatches: int, *, degree: int = 1, zero: ZeroStage = ZeroStage.NONE) -> Plan:
    return plan_of(num_microbatches * degree, num_microbatches, *[{"data": degree, "zero": zero}] * num_stages)


def test_transfers_of_two_stages():
    computations = parse("0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2")
    assert show(add_transfers(computations)) == lines(
        """
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2
        1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2
        """
    )


def test_single_stage_moves_nothing():
    assert show(lower(make_plan(1, 2), tied=False)) == "0F0 0B0 0F1 0B1 0REDUCE 0STEP"


def test_gradient_is_not_received_before_its_own_forward():
    assert show(lower(make_plan(2, 1), tied=False)) == lines(
        """
        0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0STEP
        1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1STEP
        """
    )


def test_update_of_zero_1_and_tied_parameters():
    plan = make_plan(2, 1, degree=2, zero=ZeroStage.OPTIMIZER)
    assert [show((line,)).split()[-4:] for line in lower(plan, tied=True)] == [
        ["0REDUCE", "0REDUCE_TIED", "0STEP", "0GATHER"],
        ["1REDUCE", "1REDUCE_TIED", "1STEP", "1GATHER"],
    ]


def test_nothing_to_gather_with_one_data_parallel_rank_and_nothing_tied_in_one_stage():
    plan = make_plan(1, 1, degree=2, zero=ZeroStage.PARAMETERS)
    assert show(lower(plan, tied=False)) == "0F0 0B0 0REDUCE 0STEP"
    plan = make_plan(1, 1, zero=ZeroStage.OPTIMIZER)
    assert show(lower(plan, tied=True)) == "0F0 0B0 0REDUCE 0STEP"


@pytest.mark.parametrize(("zero", "ends"), [(0, "0STEP"), (1, "0GATHER"), (2, "0GATHER"), (3, "0STEP")])
def test_ranks_that_share_a_sequence_gather_what_each_of_them_updated(zero, ends):
    plan = make_plan(1, 1, degree=2, zero=ZeroStage(zero))
    mesh = StageMesh(devices=(0, 1), data_parallel_degree=1, context_parallel_degree=2)
    plan = replace(plan, stages=(replace(plan.stages[0], mesh=mesh, microbatch_size=2),))
    assert show(lower(plan, tied=False)).split()[-1] == ends


def test_stages_gather_each_for_itself():
    computations = parse("0F0 0B0\n1F0 1B0")
    assert show(add_update(computations, tied=False, gathers=[True, False])) == lines(
        """
        0F0 0B0 0REDUCE 0STEP 0GATHER
        1F0 1B0 1REDUCE 1STEP
        """
    )


def test_between_two_groups_activations_and_gradients_are_received_as_they_are_sent():
    lowered = add_transfers(generate(4, 4, "interleaved-1f1b", num_groups=2))
    sent = [str(action) for action in lowered[1] if action.kind in SENDS]
    received = [str(action) for action in lowered[0] if action.kind in RECEIVES]
    assert sent[4:7] == ["1SEND_F2", "1SEND_B0", "1SEND_F3"]
    assert received[4:7] == ["2RECV_F2", "0RECV_B0", "2RECV_F3"]
    assert (
        show(lowered)
        .splitlines()[0]
        .startswith("0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 2RECV_B0 0F2")
    )


def test_what_is_needed_later_is_received_earlier_where_it_was_sent_earlier():
    """Group 1 sends 1B0's gradient before 1F1's activation; group 0 computes on the activation first."""
    lowered = add_transfers(parse("0F0 0F1 2F0 2B0 2F1 0B0 2B1 0B1\n1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1"))
    check(lowered, 2)
    received = [str(action) for action in lowered[0] if action.kind in RECEIVES]
    assert received == ["2RECV_F0", "2RECV_B0", "0RECV_B0", "2RECV_F1", "2RECV_B1", "0RECV_B1"]


def test_a_gradient_is_received_ahead_of_the_weights_of_another_microbatch():
    assert show(add_transfers(generate(2, 2, "zb-h1"))) == lines(
        """
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0I0 0RECV_B1 0W0 0I1 0W1
        1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1
        """
    )


@given(plans(max_devices=6), st.booleans(), st.sampled_from(["1f1b", "gpipe", "zb-h1", None]))
def test_lowering_keeps_computations_and_passes_the_check(plan, tied, name):
    if name is not None and plan.schedule != "interleaved-1f1b":
        plan = replace(plan, schedule=name)
    groups = range(plan.num_groups)
    computations = generate(plan.num_stages, plan.num_microbatches, plan.schedule, num_groups=plan.num_groups)
    lowered = lower(plan, tied=tied)
    check(lowered, plan.num_microbatches)
    assert tuple(tuple(a for a in line if a.kind in COMPUTATIONS) for line in lowered) == computations
    assert [in_flight(lowered, group) for group in groups] == [in_flight(computations, group) for group in groups]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_lists_pass_the_check_with_their_transfers(num_groups, chunks, rounds):
    num_microbatches = rounds * num_groups
    computations = generate(num_groups * chunks, num_microbatches, "interleaved-1f1b", num_groups=num_groups)
    check(add_transfers(computations), num_microbatches)


@given(plans())
def test_forwards_alone_finish_and_are_no_training(plan):
    schedule = lower_forwards(plan)
    check(schedule, plan.num_microbatches, is_trained=False)
    assert sum(action.kind is ActionKind.FORWARD for line in schedule for action in line) == (
        plan.num_stages * plan.num_microbatches
    )
    with pytest.raises(ScheduleError, match="is missing"):
        check(schedule, plan.num_microbatches)


def test_forwards_of_two_stages():
    assert show(lower_forwards(make_plan(2, 2))) == lines(
        """
        0F0 0SEND_F0 0F1 0SEND_F1
        1RECV_F0 1RECV_F1 1F0 1F1
        """
    )
