"""Steps see the rank of their rows, and talk to other processes as under DDP or not at all."""

import pytest

from tests.traps import processes
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in processes.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("processes", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_processes_do_no_harm(found, name, plan):
    check(processes.TRAPS[name], plan, found[name, plan])
