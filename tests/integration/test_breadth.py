"""What projects do besides plain steps gives under plans what it gives under DDP."""

import json
import subprocess

import pytest

from tests.integration import breadth_worker
from tests.ranks import command_of, environment
from tests.tiers import asked_for

pytestmark = pytest.mark.thorough  # the table of uses in docs/uses.md is of all of these


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("breadth")
    command = command_of(2, breadth_worker.__name__, str(out), *asked_for(request, "name"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_same(found, wanted, *, steps):
    assert len(found["losses"]) == steps
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-4, abs=1e-7)
    assert found["rates"] == wanted["rates"]
    assert found["scales"] == wanted["scales"]


@pytest.mark.parametrize("name", [*breadth_worker.CASES])
def test_it_is_as_under_ddp(ranks, name):
    for rank in ranks:
        assert_same(rank[name]["mist"], rank[name]["ddp"], steps=18)


def test_each_case_does_what_it_is_there_for(ranks):
    for rank in ranks:
        scales = rank["scaler"]["mist"]["scales"]
        assert scales[1] < scales[0], "no gradient overflowed"
        assert max(scales[5:]) > min(scales), "the scale never grew"
        assert len(set(rank["plateau"]["mist"]["rates"])) == 2
        assert rank["accumulation schedule"]["mist"]["losses"] != rank["plateau"]["mist"]["losses"]
        first = rank["frozen"]["mist"]["weights"]
        assert first["embed.weight"] != pytest.approx(rank["plateau"]["mist"]["weights"]["embed.weight"], rel=1e-6)


def test_a_fit_goes_on_within_an_epoch_from_a_checkpoint_saved_after_the_fit(ranks):
    for rank in ranks:
        found = rank["mid-epoch"]
        assert_same(found["mist"], found["ddp"], steps=9)
        # Each went on from the other's checkpoint: the optimizer's whole state was in both.
        assert_same(found["mist goes on"], found["ddp goes on"], steps=len(found["ddp goes on"]["losses"]))
        assert len(found["mist goes on"]["losses"]) >= 6


def test_the_llama_example_trains(ranks):
    for rank in ranks:
        found = rank["example"]
        assert len(found["mist"]) == 2
        assert found["mist"] == pytest.approx(found["ddp"], abs=1e-5)
        # Built without values it starts from other random numbers of the same kind.
        assert found["without values"] != found["mist"]
        assert found["without values"] == pytest.approx(found["ddp"], rel=0.1)
