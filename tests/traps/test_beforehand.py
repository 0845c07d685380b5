"""What is made before a step or a layer is there when it is tried, and what gets no gradient keeps nobody waiting."""

import pytest

from tests.tiers import asked_for
from tests.traps import beforehand
from tests.traps.run import cases, check, run_apart

FIRST = ("adds", "detached")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("beforehand", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(beforehand.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(beforehand.TRAPS[name], plan, found[name, plan])
