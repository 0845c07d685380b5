"""What steps do beside their layers is as under DDP, or no plan that could not."""

import pytest

from tests.tiers import asked_for
from tests.traps import beside
from tests.traps.run import cases, check, run_apart

FIRST = ("judged", "evaluating without", "counting", "curriculum")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("beside", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(beside.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(beside.TRAPS[name], plan, found[name, plan])
