"""Compiled code trains as under DDP, or is refused by name when the plan is made."""

import pytest

from tests.tiers import asked_for
from tests.traps import compiled
from tests.traps.run import cases, check, run_apart

FIRST = ("blocks",)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("compiled", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(compiled.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_is_refused(found, name, plan):
    check(compiled.TRAPS[name], plan, found[name, plan])
