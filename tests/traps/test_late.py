"""What changes while training is honoured, or ends it before harm."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import late
from tests.traps.run import check, run_apart

FIRST = (
    "penalty on head",
    "curriculum",
    "freezes block",
    "normalised",
    "scaled by log",
    "by hook",
    "callback by hook",
    "anneals",
)
EVERY = [(name, plan) for name, trap in late.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("late", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_late_changes_do_no_harm(found, name, plan):
    check(late.TRAPS[name], plan, found[name, plan])
