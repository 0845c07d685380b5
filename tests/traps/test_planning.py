"""Planning leaves no trace, and what it cannot try trains plainly."""

import pytest

from tests.tiers import asked_for
from tests.traps import planning
from tests.traps.run import cases, check, run_apart

FIRST = ("stream over one generator",)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("planning", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(planning.TRAPS, FIRST))
def test_it_trains_as_under_ddp(found, name, plan):
    check(planning.TRAPS[name], plan, found[name, plan])
