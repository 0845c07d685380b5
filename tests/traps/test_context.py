"""Rows that ranks share train as under DDP, or a plan that would share them is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import context
from tests.traps.run import cases, check, run_apart

FIRST = ("attention", "clipped-and-accumulated", "attention-by-hand")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("context", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(context.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(context.TRAPS[name], plan, found[name, plan])
