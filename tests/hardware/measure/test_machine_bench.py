"""On real processes: three of them, so that one is idle while a pair communicates."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import Cluster, Device, measure_profile, measuring_groups, read_profile, write_profile
from lightning_mist.hardware.groups import RankGroup
from lightning_mist.hardware.measure import machine_bench as measure
from lightning_mist.hardware.measure import operators
from lightning_mist.hardware.measure.machine_bench import (
    OPERATIONS,
    collective_call,
    fit_collective,
    measure_collectives,
)
from lightning_mist.hardware.measure.operators import Session

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
    first, *others = [read_profile(directory / f"{rank}.json")[0] for rank in range(WORLD)]
    assert all(profile == first for profile in others)
    assert first.source.startswith("measured on ")
    assert first.device == "cpu"


@pytest.mark.thorough
def test_every_operation_in_every_shape(directory: Path) -> None:
    profile = read_profile(directory / "0.json")[0]
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
    profile = read_profile(directory / "0.json")[0]
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

    monkeypatch.setattr(operators, "_seconds", timed)
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


PAYLOADS = [2**12, 2**16, 2**20, 2**24]


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e12))
def test_fit_recovers_a_line(latency: float, rate: float) -> None:
    seconds = [latency + payload / rate for payload in PAYLOADS]
    fit = fit_collective("all_reduce", 4, 2, PAYLOADS, seconds)
    for payload, second in zip(PAYLOADS, seconds, strict=True):
        assert fit.latency_seconds + payload / fit.bytes_per_second == pytest.approx(second, rel=1e-4)
    assert fit.spread < 1e-4
    assert (fit.operation, fit.group_size, fit.num_nodes) == ("all_reduce", 4, 2)


def test_small_messages_count_as_much_as_large_ones() -> None:
    noise = [1.1, 0.9, 1.05, 0.95]
    seconds = [(1e-4 + payload / 1e9) * factor for payload, factor in zip(PAYLOADS, noise, strict=True)]
    fit = fit_collective("all_reduce", 2, 1, PAYLOADS, seconds)
    assert fit.latency_seconds == pytest.approx(1e-4, rel=0.2)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=0.2)
    assert 0.01 < fit.spread < 0.2


def test_latency_is_not_negative() -> None:
    fit = fit_collective("all_reduce", 2, 1, [1000, 2000], [1e-6, 4e-6])
    assert fit.latency_seconds == 0.0
    # The best line through the origin in relative terms: b = sum(p / t) / sum((p / t)^2).
    assert fit.bytes_per_second == pytest.approx((1e9**2 + 0.5e9**2) / (1e9 + 0.5e9))


def test_a_disturbed_small_message_takes_no_longer_than_a_larger_one() -> None:
    clean = fit_collective("send_recv", 2, 1, PAYLOADS, [1e-4, 1e-4, 1e-3, 1.6e-2])
    disturbed = fit_collective("send_recv", 2, 1, PAYLOADS, [4e-3, 1e-4, 1e-3, 1.6e-2])
    assert disturbed.latency_seconds == clean.latency_seconds
    assert disturbed.bytes_per_second == clean.bytes_per_second
    assert disturbed.spread > 0.4 > clean.spread  # of four points one is off by all of its value


def test_time_that_does_not_grow_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"all_gather among 2 ranks takes .* for 4.0 KiB .*: time must grow"):
        fit_collective("all_gather", 2, 1, [4096, 8192], [2e-3, 1e-3])


def test_unknown_operation() -> None:
    group = RankGroup(ranks=(0,), num_nodes=1, handle=None)
    with pytest.raises(ValueError, match="'gossip' is not an operation: known are all_reduce"):
        collective_call("gossip", group, 8, torch.device("cpu"))


def test_without_groups_there_is_nothing_to_measure() -> None:
    session = Session(device=torch.device("cpu"), world=None)
    assert measure_collectives(session, (), 1.0, lambda text, fraction: None) == ()
