"""Hooks see DDP's gradients, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import gradients
from tests.traps.run import cases, check, run_apart

FIRST = ("logs-norms", "centralises-from-the-start", "warms-up")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("gradients", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(gradients.TRAPS, FIRST))
def test_hooks_see_the_gradients_of_ddp(found, name, plan):
    check(gradients.TRAPS[name], plan, found[name, plan])
