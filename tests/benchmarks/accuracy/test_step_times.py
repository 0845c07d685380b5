import pytest

from benchmarks.accuracy.networks import LAYERS, MAKERS, ROWS, make
from benchmarks.accuracy.step_times import clear_pairs, kendall, sample_of, spearman, summary
from benchmarks.accuracy.step_times_run import CHOSEN
from benchmarks.plans import step_time_plans


def sample(plan, predicted, *rounds, network="net"):
    return sample_of(network, {"plan": plan, "predicted_step_seconds": predicted, "rounds": rounds})


def test_sample_is_over_all_steps_of_all_rounds():
    found = sample("dp2", 0.9, [1.0, 1.1, 5.0], [0.8, 0.9, 1.0])
    assert found["measured_step_seconds"] == 1.0
    assert found["time_error"] == pytest.approx(-0.1)
    assert (found["least_round_seconds"], found["largest_round_seconds"], found["steps"]) == (0.9, 1.1, 6)
    assert found["spread"] == pytest.approx(0.1)
    assert [len(steps.split()) for steps in found["all_steps"].split("; ")] == [3, 3]


@pytest.mark.parametrize(
    ("second", "tau", "rho"), [((1, 2, 3, 4), 1.0, 1.0), ((4, 3, 2, 1), -1.0, -1.0), ((1, 2, 4, 3), 2 / 3, 0.8)]
)
def test_rank_correlations(second, tau, rho):
    assert kendall((1, 2, 3, 4), second) == pytest.approx(tau)
    assert spearman((1, 2, 3, 4), second) == pytest.approx(rho)


def test_only_clear_differences_are_judged():
    assert clear_pairs((1, 2, 3), (1.0, 1.04, 2.0)) == (2, 2)
    assert clear_pairs((3, 2, 1), (1.0, 1.04, 2.0)) == (0, 2)


def test_summary_says_how_near_the_choice_is_to_the_fastest():
    samples = [sample(CHOSEN, 1.0, [1.1]), sample("dp2", 1.2, [1.0]), sample("pp2", 2.0, [2.0])]
    first, second = summary(samples).split("\n\n")
    assert first.startswith("3 plans of 1 networks: mean absolute error 9.7% (largest 20.0%, with its sign ")
    assert second.endswith(
        f"The planner's choice took 10.0% more than the fastest, the plan predicted to be the fastest ({CHOSEN}) 10.0%."
    )


def test_plans_are_many_and_different():
    plans = step_time_plans(LAYERS, ROWS)
    assert len(plans) == len(set(plans.values())) >= 26
    for plan in plans.values():
        assert (plan.num_layers, plan.world_size, plan.global_batch_size) == (LAYERS, 2, 2 * ROWS)


@pytest.mark.parametrize("name", ["encoder", "residual"])
def test_networks_have_a_loss(name):
    work = make(name, 1)
    batch = next(iter(work.data))
    assert len(batch[0]) == ROWS
    assert work.module.training_step(batch, 0).ndim == 0
    assert name in MAKERS
