"""Optimizers see what they see under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import optimizers
from tests.traps.run import check, run_apart

FIRST = ("sam", "late-norm", "lamb")
EVERY = [(name, plan) for name, trap in optimizers.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("optimizers", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_optimizers_update_as_under_ddp(found, name, plan):
    check(optimizers.TRAPS[name], plan, found[name, plan])
