"""Hooks see parameters as under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import parameters
from tests.traps.run import check, run_apart

FIRST = ("average", "mean-teacher", "samples", "summary", "hides", "quiet")
EVERY = [(name, plan) for name, trap in parameters.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("parameters", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_hooks_see_the_parameters_of_ddp(found, name, plan):
    check(parameters.TRAPS[name], plan, found[name, plan])
