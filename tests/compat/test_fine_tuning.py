"""What people fine-tune with trains as under DDP by pipelines and with sharded parameters: ``make test-compat``."""

import json
import subprocess
import sys

import pytest

from benchmarks.uses.fine_tuning import EVERY, LIBRARIES
from tests.ranks import environment

pytestmark = pytest.mark.timeout(1200)

PLANS = ("zero3", "pp2")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    for name in LIBRARIES:
        pytest.importorskip(name, exc_type=ImportError)
    folder = tmp_path_factory.mktemp("fine-tuning")
    command = [sys.executable, "-m", "benchmarks.uses.fine_tuning", "--no-record", "--work", str(folder)]
    done = subprocess.run([*command, "--plans", *PLANS], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {key: cell for path in folder.glob("*/cells.json") for key, cell in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("key", [use.key for use in EVERY])
def test_it_trains_as_under_ddp(found, key, plan):
    assert found[f"{key}, {plan}"] == ["same", ""]
