"""Planning leaves no trace, and what it cannot try trains plainly."""

import pytest

from tests.traps import planning
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in planning.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("planning", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_it_trains_as_under_ddp(found, name, plan):
    check(planning.TRAPS[name], plan, found[name, plan])
