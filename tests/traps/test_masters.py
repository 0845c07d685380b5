"""With master weights a project trains by the arithmetic of one process, or is refused or stopped with the reason."""

import pytest

from tests.tiers import asked_for
from tests.traps import masters
from tests.traps.run import cases, check, run_apart

FIRST = ("plain", "clipped", "wide norms", "rebinds by vector", "edits groups")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("masters", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(masters.TRAPS, FIRST))
def test_it_is_the_arithmetic_of_one_process(found, name, plan):
    check(masters.TRAPS[name], plan, found[name, plan])
