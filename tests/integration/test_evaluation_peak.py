"""A model that no rank may hold whole is validated within the limit that it is trained in, as under DDP."""

import json
import subprocess

import pytest

from tests.integration import evaluation_peak_worker
from tests.integration.evaluation_peak_worker import PLANS, RANKS
from tests.machine import assume_profile
from tests.ranks import command_of, environment
from tests.tiers import tiered


def _run(folder, name):
    command = command_of(RANKS, evaluation_peak_worker.__name__, str(folder), name)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.parametrize("name", tiered(PLANS, ("mixed",)))
def test_validation_keeps_within_the_limit(tmp_path, ddp, name):
    assume_profile(tmp_path, RANKS)
    for wanted, report in zip(ddp, _run(tmp_path, name), strict=True):
        assert 0 < report["peak"] < report["limit"] < report["held"], report
        assert report["validated"] == pytest.approx(wanted["validated"], rel=1e-5)
        assert report["logged"] == pytest.approx(wanted["logged"], rel=1e-5)
