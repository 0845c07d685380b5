"""Hooks see DDP's gradients, or the plan is refused."""

import pytest

from tests.traps import gradients
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in gradients.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("gradients", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_hooks_see_the_gradients_of_ddp(found, name, plan):
    check(gradients.TRAPS[name], plan, found[name, plan])
