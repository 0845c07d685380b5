"""On real processes: three of them, so that one is idle while a pair communicates."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import Cluster, Device, measure_profile, measuring_groups, read_profile, write_profile
from lightning_mist.hardware.measure import machine_bench as measure
from lightning_mist.hardware.measure import timing
from lightning_mist.hardware.measure.collective_fit import OPERATIONS

CPU = torch.device("cpu")
WORLD = 3


def cluster(processes: int) -> Cluster:
    return Cluster(num_nodes=1, devices_per_node=processes, device=Device(name="cpu", memory_bytes=2**30, kind="cpu"))


def worker(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=WORLD)
    try:
        seen: list[tuple[str, float]] = []
        random = torch.get_rng_state()
        with measuring_groups(cluster(WORLD)) as groups:
            profile = measure_profile(
                cluster=cluster(WORLD),
                device=CPU,
                dtypes=[torch.float32, torch.bfloat16],
                groups=groups,
                progress=lambda text, fraction: seen.append((text, fraction)),
                budget_seconds=0.5,
            )
            with pytest.raises(ProfileError, match="1 groups, none of all 3 ranks"):
                measure_profile(cluster=cluster(WORLD), device=CPU, dtypes=[torch.float32], groups=groups[:1])
        with pytest.raises(ValueError, match="3 ranks for a cluster of 2 devices"), measuring_groups(cluster(2)):
            pass
        write_profile(profile, directory / f"{rank}.json")
        (directory / f"{rank}.progress").write_text(json.dumps(seen))
        assert torch.equal(random, torch.get_rng_state())
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measure")
    mp.spawn(worker, args=(path,), nprocs=WORLD)
    return path


@pytest.mark.thorough
def test_all_ranks_return_the_same(directory: Path) -> None:
    first, *others = [read_profile(directory / f"{rank}.json") for rank in range(WORLD)]
    assert all(profile == first for profile in others)
    assert first.source.startswith("measured on ")
    assert first.device == "cpu"


@pytest.mark.thorough
def test_every_operation_in_every_shape(directory: Path) -> None:
    profile = read_profile(directory / "0.json")
    found = [(cost.operation, cost.group_size, cost.num_nodes) for cost in profile.collectives]
    pairs = [(name, 2, 1) for name in OPERATIONS]
    everyone = [(name, 3, 1) for name in OPERATIONS if name != "send_recv"]
    assert found == pairs + everyone
    for cost in profile.collectives:
        assert cost.latency_seconds >= 0
        assert cost.bytes_per_second > 0
        assert cost.spread >= 0


@pytest.mark.thorough
def test_rates(directory: Path) -> None:
    profile = read_profile(directory / "0.json")
    assert [rate.dtype for rate in profile.compute] == ["float32", "bfloat16"]
    for rate in profile.compute:
        assert list(rate.flops) == [2.0 * (64 * 2**step) ** 3 for step in range(len(rate.flops))]
        assert all(value > 0 for value in rate.flops_per_second)
    assert profile.memory_bytes_per_second > 0
    assert profile.operator_seconds > 0
    assert profile.host_to_device_bytes_per_second == profile.device_to_host_bytes_per_second == 0.0


@pytest.mark.thorough
def test_progress_goes_from_start_to_end_and_is_the_same_everywhere(directory: Path) -> None:
    texts = {(directory / f"{rank}.progress").read_text() for rank in range(WORLD)}
    assert len(texts) == 1
    fractions = [fraction for _, fraction in json.loads(texts.pop())]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_one_process_without_a_process_group() -> None:
    profile = measure_profile(cluster=cluster(1), device=CPU, dtypes=[torch.float32], budget_seconds=0.1)
    assert profile.collectives == ()
    assert profile.compute[0].flops_per_second[0] > 0


@pytest.mark.parametrize(("dtypes", "budget"), [([], 1.0), ([torch.float32], 0.0)])
def test_wrong_arguments(dtypes: list[torch.dtype], budget: float) -> None:
    with pytest.raises(ValueError, match="both must be positive"):
        measure_profile(cluster=cluster(1), device=CPU, dtypes=dtypes, budget_seconds=budget)


@pytest.mark.gpu
def test_device() -> None:
    device = Device(name="any", memory_bytes=2**30)
    profile = measure_profile(
        cluster=Cluster(num_nodes=1, devices_per_node=1, device=device),
        device=torch.device("cuda", 0),
        dtypes=[torch.float16],
        budget_seconds=2.0,
    )
    assert profile.host_to_device_bytes_per_second > 0
    assert profile.device_to_host_bytes_per_second > 0


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 0.04])
def test_the_budget_is_kept_however_long_a_call_takes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = [0.0]

    def timed(function: object, calls: int, device: object) -> float:
        now[0] += calls * seconds
        return seconds

    monkeypatch.setattr(timing, "_seconds", timed)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure, "LARGEST_MATMUL", 256)
    seen: list[float] = []
    measure_profile(
        cluster=cluster(1),
        device=CPU,
        dtypes=[torch.float32],
        progress=lambda _, fraction: seen.append(fraction),
        budget_seconds=10.0,
    )
    assert 0 < now[0] <= 10.0
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
