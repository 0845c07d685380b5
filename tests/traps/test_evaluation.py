"""What validation during fit gives is what it gives under DDP, whether ranks get the whole module for it or not."""

import pytest

from tests.tiers import asked_for
from tests.traps import evaluation
from tests.traps.run import cases, check, run_apart

FIRST = ("uneven", "returned", "collected", "two-loaders")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("evaluation", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(evaluation.TRAPS, FIRST))
def test_validation_is_that_of_ddp(found, name, plan):
    check(evaluation.TRAPS[name], plan, found[name, plan])
