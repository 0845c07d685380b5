"""Buffers are on every rank what they are under DDP, or the plan is refused."""

import pytest

from tests.traps import buffers
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in buffers.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("buffers", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_buffers_are_those_of_ddp(found, name, plan):
    check(buffers.TRAPS[name], plan, found[name, plan])
