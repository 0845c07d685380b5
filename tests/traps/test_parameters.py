"""Hooks see parameters as under DDP, or the plan is refused."""

import pytest

from tests.traps import parameters
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in parameters.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("parameters", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_hooks_see_the_parameters_of_ddp(found, name, plan):
    check(parameters.TRAPS[name], plan, found[name, plan])
