"""Hooks see DDP's gradients, or the plan is refused."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import gradients
from tests.traps.run import check, run_apart

FIRST = ("logs-norms", "clips", "configures-clipping", "centralises-from-the-start", "warms-up")
EVERY = [(name, plan) for name, trap in gradients.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("gradients", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_hooks_see_the_gradients_of_ddp(found, name, plan):
    check(gradients.TRAPS[name], plan, found[name, plan])
