"""Hooks see parameters as under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import parameters
from tests.traps.run import cases, check, run_apart

FIRST = ("average", "samples")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("parameters", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(parameters.TRAPS, FIRST))
def test_hooks_see_the_parameters_of_ddp(found, name, plan):
    check(parameters.TRAPS[name], plan, found[name, plan])
