import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_mist.cli import cluster_input
from lightning_mist.cli.cluster_input import MeasuredMachine
from lightning_mist.hardware import catalog_profile, read_machine
from tests.cli.networks import refused, run


@pytest.fixture
def asked(monkeypatch):
    """Replaces the processes, which take many seconds, by the catalog; says what they were asked."""
    calls = []

    def measure(cluster, precision, *, is_fresh=False):
        calls.append((cluster.device.kind, cluster.world_size, precision, is_fresh))
        profile = replace(catalog_profile(cluster), source="measured in a test")
        return MeasuredMachine(cluster=cluster, profile=profile, kept=Path("kept.json"), seconds=12.3)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cluster_input, "measure_local", measure)
    return calls


def test_profile_shows_and_writes(asked, tmp_path, capsys):
    out = tmp_path / "profile.json"
    run("profile", "--out", out)
    assert asked == [("cpu", 2, "32-true", True)]
    shown = capsys.readouterr().out
    assert "1x2xcpu" in shown
    assert "measured in a test" in shown
    assert "all_reduce" in shown
    assert "measured in 12.3 s; kept for later runs in kept.json" in shown
    assert shown.endswith(f"profile written to {out}; use it with lightning-mist plan --cluster {out}\n")
    cluster, profile = read_machine(out)
    assert (cluster.world_size, profile.source) == (2, "measured in a test")


def test_a_plan_is_made_for_the_file(asked, tmp_path, capsys):
    out = tmp_path / "profile.json"
    run("profile", "--out", out, "--devices", "1")
    model = ("--model", "tests.cli.networks:make_net", "--global-batch-size", 4)
    capsys.readouterr()
    run("plan", "--cluster", out, *model, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [stage["devices"] for stage in found["plan"]["stages"]] == [[0]]
    assert any("the profile's rates (measured in a test)" in note for note in found["notes"])


def test_profile_as_json(asked, capsys):
    run("profile", "--json", "--devices", "1", "--precision", "bf16-mixed")
    assert asked == [("cpu", 1, "bf16-mixed", True)]
    found = json.loads(capsys.readouterr().out)
    assert (found["cluster"]["devices_per_node"], found["seconds"], found["kept"]) == (1, 12.3, "kept.json")
    assert found["profile"]["memory_bytes_per_second"] > 0


def test_more_processes_than_cores_are_told(asked, monkeypatch, capsys):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    run("profile", "--devices", "4")
    assert "4 processes share 2 cores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--accelerator", "cuda"), "accelerator 'cuda': this machine has no CUDA device; measure where there is one"),
        (("--devices", "0"), "devices = 0, accelerator 'auto': at least one device measures"),
        (("--precision", "8bit"), "precision '8bit': known precisions are"),
        (("--accelerator", "tpu"), "accelerator"),
    ],
)
def test_profile_refuses_in_one_line(asked, capsys, arguments, message):
    text = refused(capsys, "profile", *arguments)
    assert message in text
    assert "Traceback" not in text
    assert asked == []


def test_under_a_launcher_its_processes_measure(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert "under torchrun its processes measure" in refused(capsys, "profile", "--devices", "2")
    monkeypatch.setattr(cluster_input, "measure_launched", lambda accelerator, precision: None)
    run("profile")
    assert capsys.readouterr().out == ""
