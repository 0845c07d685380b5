import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.errors import ProfileError
from lightning_mist.hardware import (
    Cluster,
    CollectiveCost,
    ComputeRate,
    Device,
    HardwareProfile,
    KernelRate,
    MemoryRate,
    StepOverheads,
    catalog_profile,
    load_profile,
    parse_cluster,
    read_profile,
    save_profile,
    write_profile,
)
from lightning_mist.hardware.profile.interference_model import COEFFICIENTS, Interference
from lightning_mist.hardware.profile.profile_files import profile_path

CLUSTER = Cluster(num_nodes=1, devices_per_node=2, device=Device(name="cpu", memory_bytes=2**30, kind="cpu"))
PROFILE = dataclasses.replace(catalog_profile(CLUSTER), source="measured on a test, 2020-01-01")
POSITIVE = st.floats(1e-12, 1e18)


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    sizes = draw(st.integers(1, 4))
    numbers = st.tuples(*[POSITIVE] * sizes)
    ascending = numbers.map(lambda found: tuple(sorted(found)))
    rates = st.builds(ComputeRate, dtype=st.text(), flops=ascending, flops_per_second=numbers, spread=POSITIVE)
    costs = st.builds(
        CollectiveCost,
        operation=st.text(),
        group_size=st.integers(2, 64),
        num_nodes=st.integers(1, 8),
        latency_seconds=POSITIVE,
        bytes_per_second=POSITIVE,
        spread=POSITIVE,
    )
    coefficients = dict.fromkeys(COEFFICIENTS, st.floats(0.0, 1.0))
    memories = st.builds(
        MemoryRate,
        kind=st.text(),
        bytes=ascending,
        forward_bytes_per_second=numbers,
        backward_bytes_per_second=numbers,
        spread=POSITIVE,
    )
    kernels = st.builds(
        KernelRate,
        kind=st.text(),
        dtype=st.text(),
        forward_flops_per_second=POSITIVE,
        backward_flops_per_second=POSITIVE,
        spread=POSITIVE,
    )
    overheads = st.builds(StepOverheads, step_seconds=POSITIVE, action_seconds=POSITIVE, message_seconds=st.just(0.0))
    interferences = st.builds(Interference, **coefficients, source=st.text(), spread=POSITIVE)
    return HardwareProfile(
        device=draw(st.text()),
        source=draw(st.text()),
        compute=tuple(draw(st.lists(rates, max_size=3))),
        memory_bytes_per_second=draw(POSITIVE),
        operator_seconds=draw(POSITIVE),
        collectives=tuple(draw(st.lists(costs, max_size=3))),
        host_to_device_bytes_per_second=draw(POSITIVE),
        device_to_host_bytes_per_second=draw(POSITIVE),
        host_bytes_per_second_per_node=draw(st.one_of(st.just(0.0), POSITIVE)),
        interference=draw(st.none() | interferences),
        overheads=draw(overheads),
        rates=tuple(draw(st.lists(memories, max_size=2))),
        kernels=tuple(draw(st.lists(kernels, max_size=2))),
    )


@given(profiles())
def test_written_and_read_it_is_the_same(tmp_path_factory: pytest.TempPathFactory, profile: HardwareProfile) -> None:
    path = tmp_path_factory.mktemp("profile") / "deep" / "profile.json"
    write_profile(profile, path)
    assert read_profile(path)[0] == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_a_file_from_before_interference_and_overheads_were_known_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    content = json.loads(path.read_text())
    del content["profile"]["interference"], content["profile"]["overheads"]
    path.write_text(json.dumps(content))
    assert read_profile(path)[0] == PROFILE


def test_kept_and_found(tmp_path: Path) -> None:
    assert load_profile(tmp_path, CLUSTER) == (None, None)
    path = save_profile(PROFILE, tmp_path, CLUSTER)
    assert path == profile_path(tmp_path, CLUSTER)
    assert load_profile(tmp_path, CLUSTER, [torch.float32, torch.bfloat16]) == (PROFILE, None)


def test_memory_of_a_process_does_not_matter_but_the_number_of_processes_does(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path, CLUSTER)
    smaller = dataclasses.replace(CLUSTER, device=dataclasses.replace(CLUSTER.device, memory_bytes=2**20))
    assert load_profile(tmp_path, smaller)[0] == PROFILE
    assert load_profile(tmp_path, dataclasses.replace(CLUSTER, devices_per_node=4)) == (None, None)


def test_threads_matter(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    path = profile_path(tmp_path, CLUSTER)
    try:
        torch.set_num_threads(before + 1)
        assert profile_path(tmp_path, CLUSTER) != path
    finally:
        torch.set_num_threads(before)


def test_missing_element_types_are_measured_again(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path, CLUSTER)
    profile, warning = load_profile(tmp_path, CLUSTER, [torch.float32, torch.float16])
    assert profile is None
    assert warning is not None
    assert "has no rates of float16" in warning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[: len(content) // 2], "cannot be read"),
        (lambda content: "[]", "has schema None: schema 2 is read"),
        (lambda content: content.replace('"schema": 2', '"schema": 0'), "has schema 0: schema 2 is read"),
        (lambda content: content.replace("operator_seconds", "operator_second"), "KeyError.*; measure again"),
        (lambda content: content.replace('"spread": 0.0', '"spread": "wide"', 1), "ValueError.*; measure again"),
        (lambda content: "[" * 3000, "cannot be read"),
        (
            lambda content: content.replace('"spread": 0.0', '"spread": -1.0', 1),
            "-1.0 in place of a number that is not",
        ),
        (lambda content: content.replace(f'"source": "{PROFILE.source}"', '"source": 5'), "5 in place of text"),
        (lambda content: re.sub(r'"collectives": \[', '"collectives": 3, "": [', content), "3 in place of a list"),
        (lambda content: re.sub(r'("memory_bytes_per_second": )[\d.e+]+', r"\g<1>0.0", content), "a size or rate of 0"),
        (
            lambda content: re.sub(r'("flops": \[\s*)', r"\g<1>1e17, ", content, count=1),
            "sizes and .* rates of float32",
        ),
        (lambda content: re.sub(r'("flops": \[\s*)[\d.]+', r"\g<1>1e17", content, count=1), "they ascend"),
        (lambda content: content.replace('"corrections": []', '"corrections": [{}]'), "KeyError"),
        (lambda content: content.replace('"num_threads": "', '"num_threads": "9'), "made for num_threads '91?', not"),
    ],
)
def test_damaged_files_are_ignored_and_said(tmp_path: Path, change, message: str) -> None:
    path = save_profile(PROFILE, tmp_path, CLUSTER)
    path.write_text(change(path.read_text()))
    profile, warning = load_profile(tmp_path, CLUSTER)
    assert profile is None
    assert warning is not None
    assert warning.endswith("it is ignored")
    assert re.search(message, warning)


def test_rates_without_sizes_are_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    content = json.loads(path.read_text())
    content["profile"]["compute"][0]["flops"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="0 sizes and 6 rates of float32"):
        read_profile(path)


def test_catalog_profiles_can_be_kept_too(tmp_path: Path) -> None:
    profile = catalog_profile(parse_cluster("4x8xA100-40"))
    write_profile(profile, tmp_path / "a100.json")
    assert read_profile(tmp_path / "a100.json")[0] == profile


def test_failed_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_profile(PROFILE, tmp_path / "profile.json")
    assert list(tmp_path.iterdir()) == []
