"""What people write in many fields trains as under DDP, or not at all."""

import pytest

from tests.tiers import asked_for
from tests.traps import habits
from tests.traps.run import cases, check, run_apart

FIRST = ("Adaptive", "SkipsSteps")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("habits", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(habits.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(habits.TRAPS[name], plan, found[name, plan])
