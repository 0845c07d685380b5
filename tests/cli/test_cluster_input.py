from dataclasses import replace

import pytest
import torch

from lightning_mist.cli.cluster_input import (
    devices_of,
    in_stack,
    measure_local,
    oldest_capability,
    open_cluster,
    precision_notes,
)
from lightning_mist.errors import PlanError, ProfileError
from lightning_mist.hardware import catalog_profile, detect, parse_cluster, save_profile, write_profile
from lightning_mist.plan import plan_of
from lightning_mist.strategy.planning.local_machine import default_directory


@pytest.mark.thorough
def test_plan_for_this_machine_uses_what_was_measured_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = detect(1, 1, "cpu")
    kept = replace(catalog_profile(cluster), source="kept from earlier")
    save_profile(kept, default_directory(), cluster)
    assert open_cluster("local") == (cluster, None)
    assert measure_local(cluster, "32-true").profile == kept


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cluster 'local:3': this machine has 2 CUDA devices; use 2"):
        open_cluster("local:3")


def test_a_measured_machine_comes_from_its_file(tmp_path):
    cluster = parse_cluster("2xcpu:8GiB")
    profile = replace(catalog_profile(cluster), source="measured elsewhere")
    path = tmp_path / "profile.json"
    write_profile(profile, path, cluster=cluster)
    assert open_cluster(str(path)) == (cluster, profile)


def test_of_a_described_machine_nothing_was_measured():
    assert open_cluster("2xL4") == (parse_cluster("2xL4"), None)


def test_unlike_devices_are_named_by_stage():
    mixed = parse_cluster("1xA100-40+1xL4")
    plan = plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2)
    names = ("A100-40", "L4")
    assert devices_of(plan, mixed) == tuple(names[stage.devices[0]] for stage in plan.stages)
    assert devices_of(plan_of(4, world_size=2, global_batch_size=8), mixed) == ("A100-40 and L4",)
    assert devices_of(plan, parse_cluster("2xL4")) == ()


def test_kernels_are_those_that_all_devices_can_run():
    assert oldest_capability(parse_cluster("2xA100-40+2xL4+1xV100-32")) == (7, 0)
    assert oldest_capability(parse_cluster("2xA100-40+2xSomething:8GiB")) is None


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("1x8xL4", "--precision bf16-mixed devices multiply matrices up to 4.0 times as fast on L4,"),
        ("1x4xV100-32", "--precision 16-mixed devices multiply matrices up to 8.0 times as fast on V100-32,"),
        (
            "1x4xA100-40+1x4xV100-32",
            "up to 16.0 times as fast on A100-40 and 8.0 times as fast on V100-32, by their data sheets",
        ),
    ],
)
def test_single_precision_says_what_another_would_do(cluster, said):
    machine = parse_cluster(cluster)
    (note,) = precision_notes(machine, "32-true")
    assert said in note
    assert not precision_notes(machine, "bf16-mixed")


def test_nothing_is_said_of_precision_where_no_data_sheet_is_known():
    assert not precision_notes(parse_cluster("2xcpu:8GiB"), "32-true")


def test_a_described_machine_has_the_kernels_that_are_asked_for() -> None:
    machine = parse_cluster("2xH100")
    assert in_stack(None, machine, "eager") is None
    found = in_stack(None, machine, "fused")
    assert found is not None
    assert (found.device, found.stack) == ("H100", "fused")
    with pytest.raises(PlanError, match="the stack fused needs devices of one kind"):
        in_stack(None, parse_cluster("1xH100+1xA100-80"), "fused")
    with pytest.raises(ProfileError, match="known of machines of the catalog only"):
        in_stack(replace(found, stack="eager", source="measured"), machine, "fused")
