"""Fewer data loaders than ranks: what a user sees on every rank is what DDP over as many ranks as loaders shows."""

import json
import re
import subprocess
from functools import cache

import pytest

from tests.integration.loaders_worker import SAMPLES
from tests.ranks import command_of, environment
from tests.tiers import asked_for

pytestmark = pytest.mark.thorough  # exchanges, gradients and what is reduced have tests of their own in the first tier

CASES = [
    (processes, loaders, name)
    for processes, loaders, names in (
        (2, 1, ("pipeline", "tensor", "data", "shards", "zero bubble", "auto")),
        (4, 1, ("pipeline and data", "unlike stages")),
        (4, 2, ("pipeline and data", "pipeline and tensor", "unlike stages")),
    )
    for name in names
]


def run(tmp_path_factory, processes, loaders, names):
    """What every rank saw, by name."""
    folder = tmp_path_factory.mktemp("loaders")
    done = subprocess.run(
        command_of(processes, "tests.integration.loaders_worker", str(folder), str(loaders), *names),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What every rank saw, by processes, loaders and name; every world is started once, when it is asked for."""
    asked = [(tuple(size), name) for *size, name in asked_for(request, "case")]

    @cache
    def ran(processes, loaders):
        if processes == loaders:
            return run(tmp_path_factory, processes, loaders, ["ddp"])
        names = [name for size, name in asked if size == (processes, loaders)]
        return run(tmp_path_factory, processes, loaders, [*names, *(["refusals"] if processes == 2 else [])])

    return lambda processes, loaders, name: [rank[name] for rank in ran(processes, loaders)]


def close(value):
    """Numbers to 1e-10; everything else as it is."""
    if isinstance(value, dict):
        return {key: close(item) for key, item in value.items()}
    if isinstance(value, list):
        return [close(item) for item in value]
    return pytest.approx(value, rel=1e-10, abs=1e-12) if isinstance(value, float) else value


@pytest.mark.parametrize("case", CASES)
def test_every_rank_sees_what_the_rank_of_its_loader_sees_under_ddp(seen, case):
    processes, loaders, _ = case
    wanted, ranks = seen(loaders, loaders, "ddp"), seen(*case)
    for rank, found in enumerate(ranks):
        own = wanted[rank * loaders // processes]
        assert found["steps"] == own["steps"]
        assert found["seen"] == close(own["seen"])
    assert ranks[0]["saved"] == close(wanted[0]["saved"])


@pytest.mark.parametrize("case", CASES[:1])
def test_what_is_reduced_counts_every_loader_once(seen, case):
    logged = [values for kind, *values in seen(*case)[0]["seen"] if kind == "logged"]
    assert [(item["rows"], item["val_rows"]) for (item,) in logged] == [(SAMPLES, SAMPLES)] * 2


@pytest.mark.parametrize("case", CASES[:1])
def test_what_fewer_loaders_cannot_do_is_refused_on_every_rank(seen, case):
    expected = {
        "a loader for each rank": "at step 0: the plan is for batches of 2 data loaders, but there are 1",
        "other samples at first": "at step 0: .*rank 1 has loaded other samples than rank 0",
        "other samples later": "at step 2: .*rank 1 has loaded other samples than rank 0",
        "plain": r"only plain data parallelism could train here \(overfit_batches=2\)",
        "no divisor": "data_parallel_size = 3 on 2 processes: .* it must divide 2",
    }
    for found in seen(*case[:2], "refusals"):
        assert list(found) == list(expected)
        for name, text in found.items():
            assert re.search(expected[name], text), text
