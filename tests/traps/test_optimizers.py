"""Optimizers see what they see under DDP, or the plan is refused."""

import pytest

from tests.traps import optimizers
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in optimizers.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("optimizers", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_optimizers_update_as_under_ddp(found, name, plan):
    check(optimizers.TRAPS[name], plan, found[name, plan])
