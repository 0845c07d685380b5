"""What is around steps, evaluation, metrics, planning and other processes, is as under DDP, or the plan is refused."""

import pytest

from tests.traps.run import cases, check

FIRST = {
    "alone": ("after-a-fit", "alone", "between-fits", "alone"),
    "evaluation": ("uneven", "returned", "collected", "two-loaders"),
    "metrics": ("values", "collected", "in loss"),
    "planning": ("stream over one generator",),
    "processes": ("rank", "contrastive", "later"),
    "state": ("on class", "on numpy draws", "in block"),
    "trials": ("writes on one",),
    "unchanged": ("ordinary/auto", "ordinary/cut", "ordinary/tp2"),
}


@pytest.mark.parametrize(("family", "name", "plan"), cases(FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(outcome, family, name, plan):
    check(family, name, plan, outcome(family, name, plan))
