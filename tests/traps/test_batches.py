"""Batches of every kind train as under DDP, or under no plan that could not."""

import pytest

from tests.tiers import asked_for
from tests.traps import batches
from tests.traps.run import cases, check, run_apart

FIRST = ("jagged layers", "nested", "lock")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("batches", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(batches.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(batches.TRAPS[name], plan, found[name, plan])
