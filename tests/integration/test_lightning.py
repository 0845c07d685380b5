"""An unmodified project under DDP and under mist: the same losses, metrics, files and weights."""

import json
import subprocess

import pytest

from tests.integration import equality_worker
from tests.integration.equality_worker import CASES, FOUR, RESUMED, TWO
from tests.ranks import command_of, environment
from tests.tiers import asked_for, tiered

FEW = ("auto", "tensor", "moved")
NAMES = tiered(CASES, FEW)


def run(tmp_path_factory, processes, names):
    out = tmp_path_factory.mktemp("equality")
    command = command_of(processes, equality_worker.__name__, str(processes), str(out), *names)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    names = asked_for(request, "name")
    resumed = [f"{name}:resumed" for name in asked_for(request, "name", test="goes_on")]
    return {
        size: run(tmp_path_factory, size, asked)
        for size, cases in ((2, TWO), (4, FOUR))
        if (asked := [name for name in (*names, *resumed) if name.partition(":")[0] in cases])
    }


def ranks(results, name):
    return results[2 if name in TWO else 4]


def tolerance(name):
    return CASES[name].get("tolerance", 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_sees_ddps_losses_for_its_own_batches(results, name):
    for rank in ranks(results, name):
        ddp, mist = rank[name]["ddp"], rank[name]["mist"]
        assert len(ddp["losses"]) >= 20
        assert mist["losses"] == pytest.approx(ddp["losses"], rel=tolerance(name))
        assert mist["extras"] == pytest.approx(ddp["extras"], rel=tolerance(name), abs=tolerance(name) * 10)


@pytest.mark.parametrize("name", NAMES)
def test_callback_metrics_and_weights_are_ddps_on_every_rank(results, name):
    for rank in ranks(results, name):
        ddp, mist = rank[name]["ddp"], rank[name]["mist"]
        assert mist["metrics"] == pytest.approx(ddp["metrics"], rel=tolerance(name), abs=tolerance(name) * 10)
        assert mist["weights"] == pytest.approx(ddp["weights"], rel=max(1e-4, tolerance(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_log_file_has_ddps_rows(results, name):
    ddp, mist = (ranks(results, name)[0][name][kind]["csv"].splitlines() for kind in ("ddp", "mist"))
    assert mist[0].split(",") == ddp[0].split(",")
    assert len(mist) == len(ddp)
    for left, right in zip(mist[1:], ddp[1:], strict=True):
        for a, b in zip(left.split(","), right.split(","), strict=True):
            assert (a == b == "") or float(a) == pytest.approx(float(b), rel=tolerance(name), abs=tolerance(name) * 10)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_has_ddps_layout(results, name):
    """The same entries in the same places, of the same shapes: paths of files apart."""
    mist, ddp = (
        {
            key: text
            for key, text in ranks(results, name)[0][name][kind]["layout"].items()
            if "ModelCheckpoint" not in key
        }
        for kind in ("mist", "ddp")
    )
    assert any(key.startswith("/optimizer_states/0/state/0/") for key in ddp)
    assert mist == ddp


@pytest.mark.parametrize("name", tiered(RESUMED, ("tensor",)))
def test_each_goes_on_from_the_others_checkpoint(results, name):
    for rank in ranks(results, name):
        resumed, other = rank[name]["mist_from_ddp"], rank[name]["ddp_from_mist"]
        assert len(resumed["losses"]) == len(other["losses"]) > 0
        assert resumed["losses"] == pytest.approx(other["losses"], rel=max(1e-4, tolerance(name)))


@pytest.mark.parametrize("name", NAMES)
def test_predicted_is_compared_with_measured(results, name):
    assert ranks(results, name)[0][name]["mist"]["report"] > 0
