"""Planning leaves no trace, and what it cannot try trains plainly."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import planning
from tests.traps.run import check, run_apart

FIRST = (
    "stream over one generator",
    "dataset that augments",
    "counters",
    "lines in a file",
    "what hooks make",
    "batch norm and a metric",
    "LBFGS",
)
EVERY = [(name, plan) for name, trap in planning.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("planning", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_it_trains_as_under_ddp(found, name, plan):
    check(planning.TRAPS[name], plan, found[name, plan])
