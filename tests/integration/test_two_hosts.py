"""Two hosts with a slow link between them: plans cut there, train as DDP does, and end when a host goes."""

import json
import re
import shutil
import time

import pytest

from lightning_mist.plan import from_json
from tests.hosts import Signpost, crossings, hosts_of_stages, kill, two_hosts, why_not
from tests.integration import hosts_worker
from tests.workers import launched

pytestmark = pytest.mark.thorough

RATE, STEPS = "100mbit", 12

WORKER = hosts_worker.__name__


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    reason = why_not(folder)
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(folder, RATE) as made:
        yield made


@pytest.fixture(scope="module")
def planned(hosts, tmp_path_factory):
    """The folder of a fit on both hosts with nothing given but the strategy's name."""
    folder = tmp_path_factory.mktemp("planned")
    with hosts.running(folder, WORKER, [str(folder), "mist", str(STEPS)]) as running:
        assert running.codes(600) == [0, 0], running.output()
    return folder


def test_the_pipeline_is_cut_where_the_slow_link_is(planned):
    places = json.loads((planned / "mist.json").read_text())["hosts"]
    assert places == ["host0", "host0", "host1", "host1"]
    plan = from_json((planned / "plan.json").read_text())
    assert [len(hosts) for hosts in hosts_of_stages(plan, places)] == [1] * plan.num_stages
    assert crossings(plan, places) == 1


def test_losses_are_those_of_ddp_on_one_host(planned, tmp_path):
    launched(hosts_worker.fit, tmp_path, "ddp", STEPS, world=4, seconds=400)
    ours, theirs = (json.loads(path.read_text()) for path in (planned / "mist.json", tmp_path / "ddp.json"))
    assert len(theirs["losses"]) == STEPS
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)


@pytest.mark.parametrize("node", [0, 1])
def test_a_host_that_dies_ends_the_other(hosts, planned, tmp_path, node):
    shutil.copytree(planned / "profiles", tmp_path / "profiles")
    signpost = Signpost(tmp_path / hosts_worker.TRAINING)
    with hosts.running(tmp_path, WORKER, [str(tmp_path), "mist", "1000000"]) as running:
        assert running.come_to(signpost, 400), running.output()
        kill(hosts.both[node])
        died = time.monotonic()
        code = running.started[1 - node].wait(60)
        assert time.monotonic() - died < 60
    assert code != 0
    gone = f"rank [{2 * node}{2 * node + 1}]: its process has ended without a word"
    assert re.search(f"{gone}|Connection (closed|reset) by peer", running.logs[1 - node].read_text())
