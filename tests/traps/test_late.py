"""What changes while training is honoured, or ends it before harm."""

import pytest

from tests.traps import late
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in late.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("late", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_late_changes_do_no_harm(found, name, plan):
    check(late.TRAPS[name], plan, found[name, plan])
