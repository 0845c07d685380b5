"""Ordinary projects train as under DDP, whatever the plan."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import unchanged
from tests.traps.run import check, run_apart

FIRST = ("auto", "cut", "tp2")
EVERY = [(name, plan) for name, trap in unchanged.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("unchanged", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[1] in FIRST]))
def test_it_trains_as_under_ddp(found, name, plan):
    check(unchanged.TRAPS[name], plan, found[name, plan])
