import importlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_mist.cli.cluster_input import local_cluster, measure_here, measure_launched, measure_local
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import catalog_profile, detect, load_profile, save_profile
from lightning_mist.strategy.planning import local_machine

CPU = torch.device("cpu")

spawning = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of this name


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replaces measuring, which takes many seconds, by figures, and the user's directory; says how often."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls = []

    def measure(*, cluster, **_):
        calls.append(cluster)
        return replace(catalog_profile(cluster), source=f"measurement {len(calls)}")

    monkeypatch.setattr(local_machine, "measure_profile", measure)
    return calls


@pytest.mark.parametrize(
    ("devices", "kind", "processes", "expected"),
    [
        (0, "auto", None, ("cpu", 1)),
        (0, "auto", 3, ("cpu", 3)),
        (4, "cpu", None, ("cpu", 1)),
        (4, "cpu", 2, ("cpu", 2)),
    ],
)
def test_this_machine(monkeypatch, devices, kind, processes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    found = local_cluster(kind, processes, "so")
    assert (found.device.kind, found.world_size) == expected


@pytest.mark.parametrize(
    ("devices", "processes", "message"),
    [(0, None, "so: this machine has no CUDA device; measure where"), (2, 3, "so: this machine has 2 CUDA devices")],
)
def test_devices_that_are_not_there_are_refused(monkeypatch, devices, processes, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(ValueError, match=message):
        local_cluster("cuda", processes, "so")


@pytest.mark.usefixtures("single_rank")
def test_measuring_afresh_replaces_what_was_kept(measured):
    cluster = detect(1, 1, "cpu")
    first = measure_here(cluster, CPU, "32-true", is_fresh=True)
    assert measure_here(cluster, CPU, "32-true", is_fresh=False).profile == first.profile
    again = measure_here(cluster, CPU, "32-true", is_fresh=True)
    assert (first.profile.source, again.profile.source, len(measured)) == ("measurement 1", "measurement 2", 2)
    assert load_profile(again.kept.parent, cluster) == (again.profile, None)
    assert again.seconds > 0


@pytest.mark.thorough
def test_processes_of_its_own_find_what_was_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster = detect(2, 1, "cpu")
    kept = replace(catalog_profile(cluster), source="kept from earlier")
    path = save_profile(kept, local_machine.default_directory(), cluster)
    found = measure_local(cluster, "32-true")
    assert (found.profile, found.cluster, found.kept) == (kept, cluster, path)


def test_a_failure_in_a_process_is_told_by_its_own_words(monkeypatch, measured):
    def here(function, args, nprocs):
        try:
            function(0, *args)
        except Exception as error:
            raise spawning.ProcessRaisedException("Traceback ...", 0, 1) from error
        finally:
            dist.destroy_process_group()

    def fail(**_):
        raise ProfileError("nothing grows here")

    monkeypatch.setattr(local_machine, "measure_profile", fail)
    monkeypatch.setattr(spawning, "spawn", here)
    with pytest.raises(ProfileError, match=r"^nothing grows here$"):
        measure_local(detect(1, 1, "cpu"), "32-true", is_fresh=True)


def test_processes_of_a_launcher_measure_together(monkeypatch, measured, tmp_path):
    for name, value in {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    begin = dist.init_process_group
    store = (tmp_path / "store").as_uri()
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend: begin(backend, init_method=store, rank=0, world_size=1)
    )
    found = measure_launched("auto", "32-true")
    assert (found.cluster.world_size, found.profile.source) == (1, "measurement 1")
    assert not dist.is_initialized()


@pytest.mark.gpu
def test_a_device_is_measured_by_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = measure_local(local_cluster("cuda", 1, "one device"), "bf16-mixed", is_fresh=True)
    assert found.cluster.device.kind == "cuda"
    assert {rate.dtype for rate in found.profile.compute} >= {"float32", "bfloat16"}
    assert found.profile.host_to_device_bytes_per_second > 0
    assert found.kept.exists()
