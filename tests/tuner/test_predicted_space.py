"""The whole planner on unlike devices against predicting every plan.

``benchmarks/planner/against_brute_force.py --unlike`` does more of the same.
"""

import itertools

import numpy as np
import pytest

from lightning_mist.cost import cost_model, predictions
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from tests.tuner.predicted_space import (
    by_predicting_everything,
    closed_form,
    families,
    saving,
    stages_that_fit,
    unlike_instance,
    verdict_by_predictions,
)

# Two and three kinds of devices, with masters and without, with offload and without, of which each took another plan
# where stages in unlike parts were priced as if all devices of both their nodes sent at once.
SEEDS = (8, 12, 15, 33, 44, 55, 77, 79)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_on_unlike_devices_is_faster_as_plans_are_predicted(seed):
    verdict = verdict_by_predictions(unlike_instance(seed))
    assert verdict.difference <= PRECISION
    assert verdict.bound <= verdict.seconds * (1 + PRECISION)
    assert verdict.status == "optimal"


def test_every_plan_of_a_small_space_made_whole_takes_what_its_stages_do_alone():
    """What is said of stages by themselves holds of whole plans: all combinations are predicted, and checked."""
    instance = unlike_instance(77)
    model = cost_model(instance.network, instance.rates, instance.machine)
    plans = []
    for whole, choices in families(instance):
        for rows in itertools.product(*choices):
            plan = whole
            for index, row in enumerate(rows):
                plan = saving(plan, index, row)
            plans.append(plan)
    wanted = by_predicting_everything(instance)
    fits = [all(found) for found in stages_that_fit(instance, model, plans)]
    found = predictions(model, plans)
    seconds = [closed_form(item, plan.num_microbatches) for item, plan in zip(found, plans, strict=True)]
    assert len(plans) == wanted.plans
    assert min(itertools.compress(seconds, fits)) == pytest.approx(wanted.seconds, rel=1e-12)


def test_the_plan_fits_and_is_as_fast_as_the_search_says():
    instance = unlike_instance(55)
    found = instance.tune()
    model = cost_model(instance.network, instance.rates, instance.machine)
    (fits,) = stages_that_fit(instance, model, [found.plan])
    assert fits.all()
    assert found.closed_form_seconds == pytest.approx(closed_form(found.predicted, found.plan.num_microbatches))
    assert np.isfinite(found.bound)
