"""State beside the step is counted as under DDP, or the plan is refused or stopped."""

import pytest

from tests.tiers import asked_for
from tests.traps import state
from tests.traps.run import cases, check, run_apart

FIRST = ("on class", "on numpy draws", "in block")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("state", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(state.TRAPS, FIRST))
def test_state_is_kept_as_under_ddp(found, name, plan):
    check(state.TRAPS[name], plan, found[name, plan])
