"""Under mixed precision weights are cast as under DDP, however seldom, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import casts
from tests.traps.run import cases, check, run_apart

FIRST = ("half inside", "teacher first")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("casts", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(casts.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(casts.TRAPS[name], plan, found[name, plan])
