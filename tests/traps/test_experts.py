"""Experts train as under DDP, or under no plan that could not."""

import pytest

from tests.tiers import asked_for
from tests.traps import experts
from tests.traps.run import cases, check, run_apart

FIRST = ("as tuple", "by where", "grouped", "telling")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("experts", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(experts.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(experts.TRAPS[name], plan, found[name, plan])
