"""Adapters beside frozen weights in fewer bits, and state in fewer bits, train as under DDP."""

import pytest

from tests.tiers import asked_for
from tests.traps import quantized
from tests.traps.run import cases, check, run_apart

FIRST = ("subclass", "packed under a key")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("quantized", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(quantized.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(quantized.TRAPS[name], plan, found[name, plan])
