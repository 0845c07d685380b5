"""Trials that would never end are given up, and training is as under DDP."""

import pytest

from tests.tiers import asked_for
from tests.traps import trials
from tests.traps.run import cases, check, run_apart

FIRST = ("writes on one",)


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("trials", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(trials.TRAPS, FIRST))
def test_every_trial_has_an_end(found, name, plan):
    check(trials.TRAPS[name], plan, found[name, plan])
