"""Simulated: plans for one card hide what they copy, at batches of many tokens, and take as long as is predicted."""

import pytest

from benchmarks.planner.hidden_copies import BATCHES, CASES, hidden_part, recommended, simulate, steady_times
from tests.tiers import tiered

CARDS = {f"{name} on {device}": (name, device) for name, device in CASES if device != "A100-80"}


@pytest.mark.parametrize("case", tiered(CARDS, [*CARDS][::3]))
def test_a_plan_for_one_card_hides_its_copies(case):
    # 262 thousand tokens between two steps.
    model, plan = recommended(*CARDS[case], BATCHES[-1])
    assert plan.stages[0].offload.any
    crowded, free = (steady_times(model, plan, crowded=crowded) for crowded in (True, False))
    assert 0.85 <= hidden_part(crowded) <= hidden_part(free) <= 1.0
    least, most = (times.ends[2] - times.ends[1] for times in (free, crowded))
    # What adds gradients up is in the forecast, and not on the clock.
    assert 0.99 * least <= plan.predicted.step_seconds <= 1.02 * most


def test_a_sample_says_what_it_is():
    found = simulate("gpt3-7b", "L4", BATCHES[0])
    assert {name for name in found if "hidden" in name} == {"simulated_hidden_at_least", "simulated_hidden_at_most"}
    assert "simulated_step_seconds" in found
