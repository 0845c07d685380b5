"""Metrics that the step updates hold on every rank what they hold under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import metrics
from tests.traps.run import cases, check, run_apart

FIRST = ("values", "collected", "in loss")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("metrics", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(metrics.TRAPS, FIRST))
def test_metrics_hold_what_they_hold_under_ddp(found, name, plan):
    check(metrics.TRAPS[name], plan, found[name, plan])
