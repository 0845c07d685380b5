"""Optimizers see what they see under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import optimizers
from tests.traps.run import cases, check, run_apart

FIRST = ("put-step", "put-in-training", "eight", "late-norm", "own-rate")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("optimizers", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(optimizers.TRAPS, FIRST))
def test_optimizers_update_as_under_ddp(found, name, plan):
    check(optimizers.TRAPS[name], plan, found[name, plan])
