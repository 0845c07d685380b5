"""Compiled code trains as under DDP, or is refused by name when the plan is made."""

import pytest

from tests.traps import compiled
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in compiled.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("compiled", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_it_trains_as_under_ddp_or_is_refused(found, name, plan):
    check(compiled.TRAPS[name], plan, found[name, plan])
