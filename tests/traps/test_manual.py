"""Modules that optimise by hand train as under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import manual
from tests.traps.run import cases, check, run_apart

FIRST = ("manual", "gan-saved")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("manual", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(manual.TRAPS, FIRST))
def test_what_is_optimised_by_hand_is_as_under_ddp(found, name, plan):
    check(manual.TRAPS[name], plan, found[name, plan])
