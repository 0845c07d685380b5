"""What ranks do otherwise than each other, and in recomputation of their own, is as under DDP, or they are told."""

import pytest

from tests.tiers import asked_for
from tests.traps import branches
from tests.traps.run import cases, check, run_apart

FIRST = ("heads", "left out", "initialised", "counted")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("branches", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(branches.TRAPS, FIRST))
def test_ranks_that_differ_train_as_under_ddp_or_are_told(found, name, plan):
    check(branches.TRAPS[name], plan, found[name, plan])
