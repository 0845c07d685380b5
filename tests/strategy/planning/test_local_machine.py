from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_mist.errors import PlanError
from lightning_mist.hardware import (
    Cluster,
    Device,
    HardwareProfile,
    StepOverheads,
    catalog_profile,
    detect,
    save_profile,
)
from lightning_mist.hardware.profile.hardware_profile import ComputeRate
from lightning_mist.strategy.planning import local_machine
from lightning_mist.strategy.ranks import Progress

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring, which takes many seconds, by figures; says with which element types it was asked."""
    asked = []

    def measure(*, cluster, device, dtypes, groups, progress, budget_seconds):
        assert budget_seconds <= 10
        asked.append(dtypes)
        rates = tuple(
            ComputeRate(dtype=str(dtype).removeprefix("torch."), flops=(1e6,), flops_per_second=(1e9,), spread=0.1)
            for dtype in dtypes
        )
        return HardwareProfile(
            device=cluster.device.name,
            source="measured in a test",
            compute=rates,
            memory_bytes_per_second=1e9,
            operator_seconds=1e-6,
            collectives=(),
        )

    monkeypatch.setattr(local_machine, "measure_profile", measure)
    monkeypatch.setattr(local_machine, "measure_overheads", lambda *_: StepOverheads(step_seconds=0.5))
    return asked


def profile(directory, precision):
    return local_machine.machine_profile(detect(1, 1, "cpu"), CPU, precision, directory, Progress(enabled=True))


@pytest.mark.usefixtures("single_rank")
def test_a_machine_is_measured_once(tmp_path, measured, capsys):
    first = profile(tmp_path / "cache", "32-true")
    assert profile(tmp_path / "cache", "32-true") == first
    assert first.overheads.step_seconds == 0.5
    assert measured == [[torch.float32]]
    shown = capsys.readouterr().err
    assert "measuring this machine" in shown
    assert "using what was measured in a test" in shown


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("bf16-mixed", torch.bfloat16),
        ("16-mixed", torch.float16),
        ("64-true", torch.float64),
        ("transformer-engine", torch.bfloat16),
    ],
)
def test_a_new_precision_is_measured_too(tmp_path, measured, precision, dtype):
    profile(tmp_path / "cache", "32-true")
    rates = profile(tmp_path / "cache", precision).compute
    assert measured == [[torch.float32], [torch.float32, dtype]]
    assert [rate.dtype for rate in rates] == ["float32", str(dtype).removeprefix("torch.")]


def test_the_default_directory_is_the_users():
    assert local_machine.default_directory().parts[-2:] == (".cache", "lightning-mist")


@pytest.mark.usefixtures("single_rank")
def test_rates_that_are_known_are_not_given_up(tmp_path, measured):
    for precision in ("bf16-mixed", "16-mixed", "bf16-mixed"):
        profile(tmp_path / "cache", precision)
    assert measured == [[torch.float32, torch.bfloat16], [torch.float32, torch.float16, torch.bfloat16]]


@pytest.mark.usefixtures("single_rank", "measured")
def test_training_goes_on_where_nothing_can_be_kept(tmp_path, capsys):
    (tmp_path / "cache").write_text("a file where the directory should be")
    assert profile(tmp_path / "cache", "32-true").source == "measured in a test"
    assert "what was measured is not kept for later runs" in capsys.readouterr().err


def _guess(folder, is_known):
    two = Cluster(num_nodes=2, devices_per_node=1, device=Device(name="cpu", memory_bytes=2**30, kind="cpu"))
    if is_known:
        save_profile(catalog_profile(two), folder, two)
    one = replace(two, num_nodes=1, devices_per_node=2)
    return [local_machine.guessed_reduction(cluster, CPU, folder) for cluster in (two, one)]


def test_links_between_nodes_are_tried_until_they_are_measured(gloo_workers, tmp_path):
    (between, within), other = gloo_workers.run(2, _guess, tmp_path, False)
    assert 1e-12 < between < 1e-6
    assert within == 0.0
    assert other == [between, within]
    assert gloo_workers.run(2, _guess, tmp_path, True) == [[0.0, 0.0]] * 2


def _found_on(nodes, num_nodes):
    rank, size = dist.get_rank(), dist.get_world_size()
    where = SimpleNamespace(node_rank=nodes[rank], num_nodes=num_nodes, world_size=size, root_device=CPU)
    try:
        cluster = local_machine.cluster_for(None, where)
    except PlanError as error:
        return str(error)
    return cluster.num_nodes, cluster.devices_per_node


def test_ranks_must_fill_node_after_node(gloo_workers):
    assert gloo_workers.run(4, _found_on, (0, 0, 1, 1), 2) == [(2, 2)] * 4
    assert gloo_workers.run(4, _found_on, (3, 1, 0, 2), 4) == [(4, 1)] * 4
    dealt = gloo_workers.run(4, _found_on, (0, 1, 0, 1), 2)
    assert dealt == [dealt[0]] * 4
    assert "ranks 0 and 1 are on nodes 0 and 1: 2 ranks in a row must be on one" in dealt[0]
    assert "set num_nodes of the Trainer" in gloo_workers.run(2, _found_on, (0, 1), 1)[0]
