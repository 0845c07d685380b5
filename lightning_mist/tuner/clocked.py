"""Plans on the clock: which of those that are best by the closed form are fastest there."""

from dataclasses import replace

from lightning_mist.cost import CostModel, predict_with
from lightning_mist.plan import Plan

CLOCKED = 12
"""Plans of one search that are run on the clock, the best by the closed form. On it pipelines take between 13 % less
and 8 % more (:mod:`lightning_mist.cost.step_time`), so the best by the form need not be the fastest there; of seventeen
searches for networks of 1.3 to 22 billion parameters, with up to 36 pipelines each, the fastest was always among the
best four by the form. Three times as many leave room, and cost milliseconds each. Searches that are compared with each
other run as many, so that none is favoured."""


def clocked(model: CostModel, plan: Plan) -> Plan:
    """A plan with its prediction.

    Args:
        model: The cost model.
        plan: The plan.
    """
    return replace(plan, predicted=predict_with(model, plan))


def step_seconds_of_plan(plan: Plan) -> float:
    """Predicted seconds of one step of a plan that has been run on the clock.

    Args:
        plan: A plan with its prediction.
    """
    assert plan.predicted is not None
    return plan.predicted.step_seconds
