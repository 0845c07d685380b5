import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_mist import cli
from lightning_mist.hardware import catalog_profile, detect, save_profile
from lightning_mist.plan import Plan, Predicted, PredictedStage, StageMesh, StagePlan, load, save
from lightning_mist.strategy.machine import default_directory

PLAN = Plan(
    global_batch_size=8,
    num_microbatches=4,
    stages=tuple(
        StagePlan(layers=(index, index + 1), mesh=StageMesh(devices=(1 - index,)), microbatch_size=2)
        for index in range(2)
    ),
)

STAGE = PredictedStage(
    steady_seconds=0.3, boundary_seconds=0.1, forward_seconds=0.1, backward_seconds=0.2, peak_bytes=2**30
)

PREDICTED = replace(PLAN, predicted=Predicted(step_seconds=1.6, stages=(STAGE, STAGE)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def make_net():
    return Net(), torch.ones(4, 8)


def run(*arguments):
    cli.main([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    """The error that a command prints instead of a traceback."""
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert error.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "bare.json", tmp_path / "predicted.json"
    save(PLAN, paths[0])
    save(PREDICTED, paths[1])
    return paths


def test_show(files, capsys):
    run("show", files[1])
    assert capsys.readouterr().out.startswith("2 stages on 2 devices, 1f1b: 8 rows in 4 microbatches\n")


def test_show_against_another(files, tmp_path, capsys):
    save(replace(PLAN, schedule="gpipe"), tmp_path / "other.json")
    run("show", files[0], "--against", tmp_path / "other.json")
    assert capsys.readouterr().out.endswith("other.json:\nschedule: 1f1b -> gpipe\n")
    run("show", files[0], "--against", files[0])
    assert "the plans are equal" in capsys.readouterr().out


def test_show_writes_a_trace(files, tmp_path, capsys):
    run("show", files[1], "--trace", tmp_path / "trace.json")
    assert "simulated step: 1.6 s, the idlest stage idles for" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"0F3", "1B0", "0STEP"} <= {event["name"] for event in events}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "stage 0 (ranks 1)",
        "stage 1 (ranks 0)",
    }


def test_show_refuses_in_one_line(files, tmp_path, capsys):
    assert refused(capsys, "show", tmp_path / "none.json").startswith("lightning-mist show: error: plan file '")
    (tmp_path / "bad.json").write_text('{"schema": 1, "stages": [], "stage": 1}')
    assert "this key is not known; did you mean 'stages'?" in refused(capsys, "show", tmp_path / "bad.json")
    text = refused(capsys, "show", files[0], "--trace", tmp_path / "trace.json")
    assert "the plan has no predicted seconds" in text
    assert text.count("\n") == 1
    assert "No such file or directory" in refused(capsys, "show", files[1], "--trace", tmp_path / "none" / "trace.json")


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["show"], ["show", "a", "--agaist", "b"], ["plan", "--model", "m"]]
)
def test_wrong_arguments_are_refused_with_usage(capsys, arguments):
    assert "usage: lightning-mist" in refused(capsys, *arguments)


def test_installed_command_needs_neither_torch_nor_lightning_to_show(files):
    program = (
        "import sys, lightning_mist.cli as cli; cli.main(sys.argv[1:]); "
        "assert not {'torch', 'lightning', 'sympy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "show", str(files[0])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 stages on 2 devices")


def plan_arguments(**changes):
    values = {
        "model": "tests.test_cli:make_net",
        "cluster": "2xL4",
        "global_batch_size": 8,
        **changes,
    }
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
    return ["plan", *(item for pair in pairs for item in pair)]


def test_plan_of_a_function(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out, zero_stages="[0]", checkpointing="false", precision="bf16-mixed"))
    text = capsys.readouterr()
    plan = load(out)
    assert (plan.world_size, plan.global_batch_size, plan.num_layers) == (2, 8, 4)
    assert all(stage.zero_stage == 0 and stage.checkpointing.layers == 0 for stage in plan.stages)
    assert plan.predicted.step_seconds > 0
    made_for = dict(plan.fingerprint)
    assert (made_for["world_size"], made_for["batch_rows"], made_for["layer_kinds"]) == ("2", "4", "4A")
    assert made_for["precision"] == "bf16-mixed"
    assert "predicted step: " in text.out
    assert text.out.endswith(f"plan written to {out}\n")
    assert "tracing Net" in text.err


def test_plan_limits_the_search(tmp_path):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out, max_stages=1, memory_limit="1GiB"))
    assert load(out).num_stages == 1


def test_plan_of_a_configuration(tmp_path, capsys):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    configuration = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    run(*plan_arguments(model=tmp_path / "config.json", seq_len=16, out=tmp_path / "plan.json"))
    assert load(tmp_path / "plan.json").num_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt5"}, "model 'gpt5': not a preset"),
        ({"cluster": "2xL5"}, "L5"),
        ({"cluster": "local:"}, "cluster 'local:': write local"),
        ({"cluster": "local:none"}, "cluster 'local:none': write local, or local: and a number of processes"),
        ({"global_batch_size": 0}, "global_batch_size = 0: at least one row is needed"),
        ({"global_batch_size": 7}, "global_batch_size = 7 on 2 devices"),
        ({"memory_limit": "lots"}, "'lots' is not a size"),
        ({"memory_limit": "1B"}, "memory_limit"),
        ({"optimizer": "lr_scheduler"}, "optimizer 'lr_scheduler' is not a class in torch.optim"),
        ({"precision": "8bit"}, "precision '8bit': known precisions are"),
        ({"zero_stages": "[7]"}, "zero_stages"),
    ],
)
def test_plan_refuses_without_a_traceback(capsys, changes, message):
    changes = {"seq_len": 8, **changes}
    text = refused(capsys, *plan_arguments(**changes))
    assert message in text
    assert "Traceback" not in text


def test_plan_for_this_machine_uses_what_was_measured_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = detect(1, 1, "cpu")
    kept = replace(catalog_profile(cluster), source="kept from earlier")
    save_profile(kept, default_directory(), cluster)
    assert cli._cluster("local") == cluster
    assert cli._measured(cluster, "32-true") == kept


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cluster 'local:3': this machine has 2 CUDA devices; write local:2"):
        cli._cluster("local:3")


class Wide(nn.Module):
    """Layers that devices can share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)
        )

    training_step = Net.training_step


def make_wide():
    return Wide(), torch.ones(4, 8)


def test_plan_looks_at_devices_that_share_layers(tmp_path, capsys):
    arguments = ("plan", "--cluster", "1x2xL4", "--global-batch-size", 8, "--out", tmp_path / "plan.json")
    asked = ("--max-stages", 1, "--tensor-parallel-degrees", "[2]")
    run(*arguments, "--model", "tests.test_cli:make_wide", *asked)
    assert "finding out how 2 devices could share layers" in capsys.readouterr().err
    assert [stage.mesh.tensor_parallel_degree for stage in load(tmp_path / "plan.json").stages] == [2]
    run(*arguments, "--model", "tests.test_cli:make_net", "--tensor-parallel-degrees", "null")
    shown = capsys.readouterr()
    assert "without tensor parallelism: Sequential stays whole: no two linear layers" in shown.out
    assert {stage.mesh.tensor_parallel_degree for stage in load(tmp_path / "plan.json").stages} == {1}
