"""State beside the step is counted as under DDP, or the plan is refused or stopped."""

import pytest

from tests.traps import state
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in state.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("state", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_state_is_kept_as_under_ddp(found, name, plan):
    check(state.TRAPS[name], plan, found[name, plan])
