"""Buffers are on every rank what they are under DDP, or the plan is refused."""

import pytest

from tests.tiers import asked_for
from tests.traps import buffers
from tests.traps.run import cases, check, run_apart

FIRST = ("batch-norm", "copied-through-data")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("buffers", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(buffers.TRAPS, FIRST))
def test_buffers_are_those_of_ddp(found, name, plan):
    check(buffers.TRAPS[name], plan, found[name, plan])
