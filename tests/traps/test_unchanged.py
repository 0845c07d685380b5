"""Ordinary projects train as under DDP, whatever the plan."""

import pytest

from tests.traps import unchanged
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in unchanged.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("unchanged", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_it_trains_as_under_ddp(found, name, plan):
    check(unchanged.TRAPS[name], plan, found[name, plan])
