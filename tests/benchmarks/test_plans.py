import pytest

from benchmarks.plans import data_parallel, pipeline, plans_for_two


@pytest.mark.parametrize(("layers", "rows"), [(8, 8), (16, 8), (8, 16)])
def test_two_devices_have_a_dozen_different_plans(layers: int, rows: int) -> None:
    plans = plans_for_two(layers, rows)
    assert len(plans) == len(set(plans.values())) == 12
    for plan in plans.values():
        assert (plan.num_layers, plan.world_size, plan.global_batch_size) == (layers, 2, 2 * rows)


def test_last_stage_is_on_rank_0() -> None:
    assert pipeline((2, 2, 2), 3, microbatches=9).stages[-1].devices == (0,)


def test_plain_data_parallel_plan_cuts_nothing() -> None:
    plan = data_parallel(4, 3, 5)
    assert (plan.num_microbatches, plan.stages[0].microbatch_size, plan.global_batch_size) == (1, 5, 15)
