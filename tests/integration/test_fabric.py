"""``Fabric(strategy="mist")`` on two ranks: loops of every kind against Fabric's DDP."""

import json
import subprocess

import pytest

from tests.integration.fabric_traps import TRAPS
from tests.integration.fabric_worker import CASES
from tests.ranks import command_of, environment

TOLERANCE = {"double": 1e-10, "stages double": 1e-10}
OFTEN = ("zero1", "zero3", "forgetting", "stages double")
RESUMED = ("zero3",)
"""Cases that every change runs, and those of them that are gone on from."""

TRAPS_OFTEN = ("two forwards", "factor of the rank", "other output", "never averaged", "looked at output")
MORE_TRAPS = [name for name in (*TRAPS, "adversaries") if name not in TRAPS_OFTEN]


def run(module, folder, names):
    command = command_of(2, f"tests.integration.{module}", str(folder), *names)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def often(tmp_path_factory):
    return run("fabric_worker", tmp_path_factory.mktemp("often"), [*OFTEN, *(f"{name}:resumed" for name in RESUMED)])


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    names = [name for name in CASES if name not in OFTEN]
    return run("fabric_worker", tmp_path_factory.mktemp("others"), [*names, *(f"{name}:resumed" for name in names)])


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    return run("fabric_traps", tmp_path_factory.mktemp("traps"), TRAPS_OFTEN)


@pytest.fixture(scope="module")
def more_traps(tmp_path_factory):
    return run("fabric_traps", tmp_path_factory.mktemp("more_traps"), MORE_TRAPS)


def numbers(value, name=""):
    if isinstance(value, dict):
        return {key: number for item in value for key, number in numbers(value[item], f"{name}/{item}").items()}
    if isinstance(value, list):
        return {key: x for index, item in enumerate(value) for key, x in numbers(item, f"{name}/{index}").items()}
    return {} if isinstance(value, str) else {name: value}


def compare(results, case):
    for rank, result in enumerate(results):
        for start in ("", " resumed") if "mist resumed" in result[case] else ("",):
            ddp, ours = (result[case][f"{strategy}{start}"] for strategy in ("ddp", "mist"))
            assert (ddp["plan"], ours["plan"]) == ("DDPStrategy", "MistFabricStrategy")
            assert ours["told"], rank
            assert numbers(ours) == pytest.approx(numbers(ddp), abs=TOLERANCE.get(case, 1e-5))


@pytest.mark.parametrize("case", OFTEN)
def test_losses_parameters_and_states_are_those_of_ddp(often, case):
    compare(often, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [name for name in CASES if name not in OFTEN])
def test_so_they_are_in_further_cases(others, case):
    compare(others, case)


REFUSED = {
    "two forwards of logits": "TraceError: backward through a forward that was let go: the module ran again",
    "factor of the rank": "TraceError: ranks multiply the module's loss by 1 to 2",
    "other output": "TraceError: the loop's loss depends on another output of the module than its loss",
    "never averaged": "TraceError: optimizer.step after a forward inside no_backward_sync",
    "stepped in between": "TraceError: backward through a forward that was let go: the optimizer stepped",
    "trained in eval mode": "TraceError: backward through a forward that the plan does not train",
    "clipped by hand": "PlanError: the plan has zero_stage of 2, which this module rules out: the loop may look at",
    "averaged by hand": "PlanError: square of ",
    "backward of its own": "RuntimeError: The current strategy and precision selection requires you to call",
    "evaluated in between, away": "TraceError: backward through a forward that was let go: the module was evaluated",
    "stages of a scaled loss": "PlanError: the plan has 2 stages, which this module rules out: losses are scaled",
    "stages of logits": "PlanError: the plan has 2 stages, which this module rules out: the loop computes the loss",
}


@pytest.mark.parametrize("trap", TRAPS_OFTEN)
def test_traps_train_as_under_ddp_or_are_refused(traps, trap):
    judge(traps, trap)


@pytest.mark.thorough
@pytest.mark.parametrize("trap", MORE_TRAPS)
def test_so_do_further_traps(more_traps, trap):
    judge(more_traps, trap)


def judge(traps, trap):
    for result in traps:
        assert result[trap]["error"].startswith(REFUSED.get(trap, ""))
        assert bool(result[trap]["error"]) == (trap in REFUSED)
    if trap not in REFUSED:  # rank 0 has the whole module
        assert traps[0][trap]["difference"] < 1e-5
