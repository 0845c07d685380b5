"""What changes while training is honoured, or ends it before harm."""

import pytest

from tests.tiers import asked_for
from tests.traps import late
from tests.traps.run import cases, check, run_apart

FIRST = ("penalty on head", "normalised")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("late", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(late.TRAPS, FIRST))
def test_late_changes_do_no_harm(found, name, plan):
    check(late.TRAPS[name], plan, found[name, plan])
