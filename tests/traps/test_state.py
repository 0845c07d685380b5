"""State beside the step is counted as under DDP, or the plan is refused or stopped."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import state
from tests.traps.run import check, run_apart

FIRST = (
    "on class",
    "on iterator",
    "on array",
    "on callback",
    "on numpy draws",
    "in block",
    "late attribute",
    "harmless",
)
EVERY = [(name, plan) for name, trap in state.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("state", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_state_is_kept_as_under_ddp(found, name, plan):
    check(state.TRAPS[name], plan, found[name, plan])
