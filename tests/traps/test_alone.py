"""What validation, test and prediction outside of a fit give is what they give under DDP, by a plan or whole."""

import pytest

from tests.tiers import asked_for
from tests.traps import alone
from tests.traps.run import cases, check, run_apart

FIRST = ("after-a-fit", "alone", "between-fits", "alone")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("alone", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(alone.TRAPS, FIRST))
def test_evaluation_is_that_of_ddp(found, name, plan):
    check(alone.TRAPS[name], plan, found[name, plan])
