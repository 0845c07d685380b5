"""Optimizers of libraries train, save and go on as under DDP, to the bit in double precision: ``make test-compat``."""

import json
import subprocess
import sys
from functools import cache

import pytest

from tests.compat.optimizers import BROUGHT, REFUSED, TRAINED
from tests.ranks import environment

pytestmark = pytest.mark.timeout(1200)


@cache
def found(name):
    pytest.importorskip(name.split()[0], exc_type=ImportError)
    command = [sys.executable, "-m", "tests.compat.optimizers", name]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("plan", [*TRAINED, "ddp", "ddp again"])
@pytest.mark.parametrize("name", BROUGHT)
def test_trains_and_goes_on_as_under_ddp(name, plan):
    assert found(name)[plan] == []


@pytest.mark.parametrize("plan", REFUSED)
@pytest.mark.parametrize("name", BROUGHT)
def test_what_would_hold_other_blocks_is_refused_with_the_numbers(name, plan):
    """Or equal to the bit."""
    verdict = found(name)[plan]
    assert verdict == [] or all("256 entries" in text for text in verdict), verdict
