"""Steps see the rank of their rows, and talk to other processes as under DDP or not at all."""

import pytest

from tests.tiers import asked_for, tiered
from tests.traps import processes
from tests.traps.run import check, run_apart

FIRST = (
    "rank",
    "rank by dist",
    "rank by later hook",
    "contrastive",
    "centred",
    "later",
)
EVERY = [(name, plan) for name, trap in processes.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("processes", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_processes_do_no_harm(found, name, plan):
    check(processes.TRAPS[name], plan, found[name, plan])
