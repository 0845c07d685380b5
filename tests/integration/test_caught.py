"""An error that a program catches is not final, and ranks that come apart do not wait for each other."""

import json
import subprocess
import sys

import pytest

from tests.integration import caught_worker
from tests.ranks import environment
from tests.tiers import asked_for, tiered

PLANS = ("plain", "zero1", "zero3", "pp2", "tp2")
TRIALS = [f"{case}/{plan}" for case in ("all", "first", "last", "pruned", "pruned on one", "setup") for plan in PLANS]
TRIALS += ["again/pp2", "again/zero3", "first/auto", "slow/plain", "slow/pp2", "same/zero1", "same/plain"]
FIRST_TRIALS = ("last/plain", "all/pp2")

REFUSED = {
    "parts/zero3": "modules have hooks on some ranks only",
    "blocks/zero3": "modules have hooks on some ranks only",
    "embed/tp2": "modules have hooks on some ranks only",
    "whole/zero1": "a hook on the LightningModule itself",
    "whole/zero3": "a hook on the LightningModule itself",
    "same/tp2": "the parameters of the module on rank 0 have no values",
    "same/pp2": "the parameters of the module on rank 0 have no values",
    "same on one/zero3": "the parameters of the module on rank 0 have no values",
}
"""What would wait or train wrongly is refused on all ranks."""

WATCHED = ("outputs/zero1", "whole/plain", "every/auto")
APART = ("uneven/plain", "uneven/zero1", "uneven/zero3", "uneven/pp2", "uneven/tp2")
TEARDOWN = ("teardown/pp2", "teardown/zero1")
TESTED = ("tested/tp2", "tested/zero3", "tested/pp2")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    names = asked_for(request, "name")
    names = [*dict.fromkeys([*names, *(name for wanted in names for name in beside(wanted))])]
    command = [sys.executable, "-m", caught_worker.__name__, str(tmp_path_factory.mktemp("caught")), *names]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def beside(name):
    """What a world is compared with."""
    case, _ = name.split("/")
    if name in TRIALS:
        return ["same/ddp"] if case == "same" else ["none/ddp"]
    return [f"{case}/ddp"] if name in WATCHED else []


def trained(found, name):
    assert found[name]["codes"] == [0, 0], found[name]["output"][-3000:]
    for seen, wanted in zip(found[name]["seen"], found[beside(name)[0]]["seen"], strict=True):
        assert seen["steps"] == wanted["steps"]
        assert seen["weights"] == pytest.approx(wanted["weights"], rel=1e-9, abs=1e-9)
        assert seen["looks"] == pytest.approx(wanted["looks"], rel=1e-9)
    return found[name]["seen"]


@pytest.mark.parametrize("name", tiered(TRIALS, FIRST_TRIALS))
def test_a_fit_that_follows_a_caught_error_trains(found, name):
    case, _ = name.split("/")
    for number, seen in enumerate(trained(found, name)):
        may_be_over = case == "pruned on one" and number == 1  # where nothing waits behind the last validation
        assert may_be_over or len(seen["errors"]) == len(caught_worker.TRIALS[case])
        for kind, text, trial, seconds in seen["errors"]:
            is_pruned = "pruned" in case or case == "setup"
            assert (kind, trial) == (("Pruned", 7) if is_pruned else ("RuntimeError", None))
            assert ("too slow" if "pruned" in case else "no data" if case == "setup" else "not enough") in text
            if case in ("first", "last"):
                other = 0 if case == "first" else 1
                assert (f"rank {other} failed, and rank {number} waited for it" in text) == (number != other)
            assert seconds < 60


@pytest.mark.parametrize("name", tiered(WATCHED, ()))
def test_what_a_logger_of_one_rank_watches_is_as_under_ddp(found, name):
    trained(found, name)


@pytest.mark.parametrize("name", tiered(tuple(REFUSED), ("parts/zero3",)))
def test_what_ranks_do_not_agree_on_is_refused(found, name):
    assert found[name]["codes"] == [1, 1]
    assert REFUSED[name] in found[name]["output"]


@pytest.mark.parametrize("name", tiered(APART, ("uneven/plain",)))
def test_ranks_whose_data_end_apart_end_soon(found, name):
    assert None not in found[name]["codes"]
    assert any(found[name]["codes"])
    assert found[name]["seconds"] < 40


@pytest.mark.parametrize("name", tiered(TEARDOWN, ()))
def test_a_rank_that_fails_while_another_is_in_the_teardown_before_ends_it(found, name):
    assert found[name]["codes"] == [1, 1]
    assert "rank 1 failed, and rank 0 waited for it: Pruned" in found[name]["output"].replace(
        f"{caught_worker.__name__}.", ""
    )


@pytest.mark.parametrize("name", tiered(TESTED, ("tested/tp2",)))
def test_a_module_whose_values_came_late_is_tested_after_its_fit(found, name):
    assert found[name]["codes"] == [0, 0], found[name]["output"][-3000:]
    first, second = found[name]["seen"]
    assert first == second
    assert first["tested"][0]["test_loss"] > 0
