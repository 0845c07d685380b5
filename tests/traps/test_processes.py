"""Steps see the rank of their rows, and talk to other processes as under DDP or not at all."""

import pytest

from tests.tiers import asked_for
from tests.traps import processes
from tests.traps.run import cases, check, run_apart

FIRST = ("rank", "contrastive", "later")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("processes", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(processes.TRAPS, FIRST))
def test_processes_do_no_harm(found, name, plan):
    check(processes.TRAPS[name], plan, found[name, plan])
