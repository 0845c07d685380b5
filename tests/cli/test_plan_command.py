import json
import re
import subprocess
import sys

import pytest

from lightning_mist.plan import from_json, load
from lightning_mist.plan.plan_text import recipe_of
from tests.cli.networks import refused, run


def plan_arguments(**changes):
    values = {
        "model": "tests.cli.networks:make_net",
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
    assert text.out.startswith("Net (288 parameters) in bf16-mixed with AdamW on 1x2xL4: 8 rows per step\n")
    for name in ("plan", "speed", "memory", "why", "note"):
        assert f"\n{name}  " in text.out
    assert f"\nplan    {recipe_of(plan)}\n" in text.out
    assert "Fits in 22.5 GiB per device: stage 0 of" in text.out
    assert text.out.endswith(f"plan written to {out}\n")
    assert "tracing Net" in text.err


def test_plan_as_json(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out), "--json")
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    plan = load(out)
    assert from_json(json.dumps(found["plan"])) == plan
    rates, work = found["rates"], plan.predicted.work
    assert rates["rows_per_second"] == pytest.approx(8 / plan.predicted.step_seconds)
    assert rates["utilisation"] == pytest.approx(
        work.model_flops / plan.predicted.step_seconds / 2 / work.peak_flops_per_second
    )
    assert rates["roofline_ratio"] >= 1
    assert rates["tokens_per_second"] is None  # floating-point rows are no tokens
    assert "Fits in" in found["memory"]
    assert any("stage candidates" in note for note in found["notes"])
    assert "plan written to" in shown.err


def test_a_batch_that_is_no_multiple_of_the_devices_is_that_of_fewer_loaders(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out, global_batch_size=7))
    assert ", loaders 1\n" in capsys.readouterr().out
    plan = load(out)
    assert (plan.data_parallel_size, dict(plan.fingerprint)["batch_rows"]) == (1, "7")


def test_plan_beside_others(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out, zero_stages="[0]"), "--compare")
    text = capsys.readouterr()
    assert "what people would have chosen" in text.out
    assert "Megatron-LM" in text.out
    assert "comparing with FSDP" in text.err
    run(*plan_arguments(zero_stages="[0]"), "--compare", "--json")
    found = json.loads(capsys.readouterr().out)["compare"]
    assert found[0]["ratio"] == 1.0
    assert from_json(json.dumps(found[0]["plan"])) == load(out)
    assert {"DDP", "FSDP", "Aceso"} <= {item["name"] for item in found}


def test_plan_limits_the_search(tmp_path):
    out = tmp_path / "plan.json"
    run(*plan_arguments(out=out, max_stages=1, memory_limit="1GiB"))
    assert load(out).num_stages == 1


def test_plan_says_where_zero_has_nothing_to_share(capsys):
    run(*plan_arguments(num_stages="[2]", zero_stages="[1]"))
    assert "zero_stages = (1,): ZeRO shares nothing out on these stages of the plan: 0, 1." in capsys.readouterr().out


@pytest.mark.thorough
def test_plan_of_a_configuration(tmp_path, capsys):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    configuration = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    run(*plan_arguments(model=tmp_path / "config.json", seq_len=16, out=tmp_path / "plan.json"))
    assert load(tmp_path / "plan.json").num_layers == 2


ORDINARY = (
    {"model": "gpt3-22b", "cluster": "4x8xL4", "global_batch_size": 512, "seq_len": 2048, "solver_seconds": 5},
    {"model": "gpt3-1.3b", "cluster": "1x2xL4", "seq_len": 512},
    {"model": "llama-7b", "cluster": "1xL4", "seq_len": 2048, "precision": "bf16-true"},
    {"model": "gpt3-1.3b", "cluster": "1x4xA100-40+1x4xV100-32", "global_batch_size": 16, "seq_len": 256},
    {"model": "gpt3-1.3b", "cluster": "8xH100", "global_batch_size": 64, "seq_len": 256, "precision": "32-true"},
    {"memory_limit": "6GiB"},
)


@pytest.mark.parametrize("asked", ORDINARY, ids=lambda asked: asked.get("model", "Net"))
def test_a_plan_is_told_on_one_screen(capsys, asked):
    run(*plan_arguments(**asked))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert not any(re.search(r"\de-\d", line) for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt5"}, "model 'gpt5': not a preset"),
        ({"cluster": "2xL5"}, "L5"),
        ({"cluster": "local:"}, "cluster 'local:': write local"),
        ({"cluster": "local:none"}, "cluster 'local:none': write local, or local: and a number of processes"),
        ({"global_batch_size": 0}, "global_batch_size = 0: at least one row is needed"),
        ({"global_batch_size": 7, "data_parallel_size": 2}, "global_batch_size = 7 with data_parallel_size = 2"),
        ({"memory_limit": "lots"}, "'lots' is not a size"),
        ({"memory_limit": "1B"}, "memory_limit"),
        ({"memory_limit": "100GiB"}, "more than nothing and at most the 22.5 GiB of a device"),
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


def test_an_error_in_the_user_s_code_is_told_once(capsys):
    with pytest.raises(SystemExit) as error:
        run(*plan_arguments(model="tests.cli.networks:make_nothing"))
    assert error.value.code == 1
    text = capsys.readouterr().err
    assert text.count("Traceback") == 1
    assert 'return {}["nothing"]' in text
    assert text.endswith("lightning-mist plan: error: running the model: KeyError: 'nothing'\n")


@pytest.mark.thorough
def test_plan_looks_at_devices_that_share_layers(tmp_path, capsys):
    arguments = ("plan", "--cluster", "1x2xL4", "--global-batch-size", 8, "--out", tmp_path / "plan.json")
    asked = ("--max-stages", 1, "--tensor-parallel-degrees", "[2]")
    run(*arguments, "--model", "tests.cli.networks:make_wide", *asked)
    assert "finding out how 2 devices could share layers" in capsys.readouterr().err
    assert [stage.mesh.tensor_parallel_degree for stage in load(tmp_path / "plan.json").stages] == [2]
    run(*arguments, "--model", "tests.cli.networks:make_net", "--tensor-parallel-degrees", "null")
    shown = capsys.readouterr()
    assert "without tensor parallelism: Sequential stays whole: no two linear layers" in shown.out
    assert {stage.mesh.tensor_parallel_degree for stage in load(tmp_path / "plan.json").stages} == {1}


def test_plan_says_in_short_why_and_all_of_it_when_asked(capsys):
    run(*plan_arguments(schedules='["1f1b"]'))
    short = capsys.readouterr().out
    assert "\nwhy     - " in short
    assert "reasons, tables and sources: --explain or --html report.html" in short
    assert "better machine" not in short
    assert "\u2502" not in short  # no tables
    run(*plan_arguments(schedules='["1f1b"]'), "--explain")
    full = capsys.readouterr().out
    assert "bytes of the most loaded device at its peak, by stage" in full
    assert "what binds and what does not\n- " in full
    assert "predicted step: " in full
    for title in ("how sure it is that this plan is the best", "what to know of this plan"):
        assert f"\n\n{title}" in full
    assert max(map(len, full.splitlines())) <= 120
    assert "what a better machine would buy\n- 1.0 GiB more memory per device: " in full
    assert "--explain" not in full


def test_plan_as_json_explains_when_asked(capsys):
    run(*plan_arguments(schedules='["1f1b"]'), "--json")
    assert "explanation" not in json.loads(capsys.readouterr().out)
    run(*plan_arguments(schedules='["1f1b"]'), "--json", "--explain")
    found = json.loads(capsys.readouterr().out)
    why = found["explanation"]
    assert why["step_seconds"] == found["plan"]["predicted"]["step_seconds"]
    assert {item["limit"] for item in why["findings"]} >= {"memory", "batch"}
    assert why["what_ifs"][0]["change"] == "1.0 GiB more memory per device"


def test_plan_for_unlike_devices(tmp_path, capsys):
    out = tmp_path / "plan.json"
    run(*plan_arguments(cluster="1xA100-40+1xL4", out=out, schedules='["1f1b"]'), "--explain", "--explain-seconds", 0.1)
    text = capsys.readouterr().out
    plan = load(out)
    assert plan.world_size == 2
    if plan.num_stages == 2:
        assert [stage.devices for stage in plan.stages] in ([(0,), (1,)], [(1,), (0,)])
    assert any("A100-40" in line and "│" in line for line in text.splitlines())
    assert "18.0 GiB per device, 80% of the memory of L4" in text.replace("\n  ", " ")
    assert "Fits in " in text


def test_layers_are_shared_on_unlike_devices_too(tmp_path):
    """One part has one device per node, so that there is no number of devices that the nodes of both parts share."""
    arguments = ("--model", "gpt3-1.3b", "--seq-len", 512, "--precision", "bf16-true", "--global-batch-size", 3)
    limits = ("--schedules", '["1f1b"]', "--num-stages", "[2]", "--zero-stages", "[0]", "--offload", "[]")
    shared = ("--tensor-parallel-degrees", "[1,2]", "--data-parallel-degrees", "[1]", "--devices-per-stage", "[1,2]")
    out = tmp_path / "plan.json"
    run("plan", *arguments, *limits, *shared, "--cluster", "1x2xA100-40+1xL4", "--out", out)
    assert {stage.mesh.tensor_parallel_degree for stage in load(out).stages} == {1, 2}


def test_layers_shared_over_two_nodes_are_priced_where_it_is_asked_for(tmp_path):
    preset = ("--model", "gpt3-7b", "--seq-len", 512, "--cluster", "2x8xH100", "--global-batch-size", 16)
    limits = ("--max-stages", 1, "--schedules", "1f1b", "--precision", "bf16-true")
    seconds = {}
    for degree in (8, 16):
        out = tmp_path / f"{degree}.json"
        run("plan", *preset, *limits, "--tensor-parallel-degrees", degree, "--out", out)
        plan = load(out)
        assert {stage.mesh.tensor_parallel_degree for stage in plan.stages} == {degree}
        seconds[degree] = plan.predicted.step_seconds
    # Every layer's sums go over the network between the nodes.
    assert seconds[16] > seconds[8]


def test_forecasts_look_at_offload_and_are_not_marked_for_it(tmp_path, capsys):
    """AdamW's state of 1.4 billion parameters in 32 bits fits into no L4 beside them."""
    out = tmp_path / "plan.json"
    preset = ("--model", "gpt3-1.3b", "--seq-len", 256, "--cluster", "1x1xL4", "--global-batch-size", 1)
    preset = (*preset, "--precision", "32-true")
    run("plan", *preset, "--schedules", "1f1b", "--out", out)
    assert load(out).stages[0].offload.optimizer > 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a forecast" not in said
    assert "offload of optimizer state" in said
    assert "1 row of 256 tokens per step" in said
    text = refused(capsys, "plan", *preset, "--offload", "[]")
    assert "no plan fits. The least that any plan without offload needs is" in text
    assert "Use devices with" in text


def test_a_forecast_is_in_what_people_train_in(tmp_path, capsys):
    """bf16 with fp32 masters where devices multiply in it."""
    out = tmp_path / "plan.json"
    preset = ("--model", "gpt3-1.3b", "--seq-len", 256, "--global-batch-size", 8, "--schedules", "1f1b")
    run("plan", *preset, "--cluster", "1x8xL4", "--out", out)
    first = " ".join(capsys.readouterr().out.split())
    assert "in bf16-true with fp32 master weights (no --precision was given) with AdamW" in first
    assert dict(load(out).fingerprint)["precision"] == "bf16-true with master weights"
    run("plan", *preset, "--cluster", "1x8xL4", "--precision", "bf16-true", "--master-weights", "--out", out)
    assert "in bf16-true with fp32 master weights with AdamW" in " ".join(capsys.readouterr().out.split())
    text = refused(capsys, "plan", *preset, "--cluster", "1x8xL4", "--precision", "bf16-mixed", "--master-weights")
    assert "--master-weights with --precision bf16-mixed" in text


_RATIOS = ("--offload-ratios", "[0,0.5,1]")


@pytest.mark.parametrize(
    ("model", "cluster", "more"),
    [
        ("llama-7b", "1x1xA100-80", ()),
        ("llama-7b", "1x2xRTX3090", ("--num-stages", 2)),
        ("llama3-8b", "1x1xRTX4090", ("--host-memory-limit", "250GiB")),
        ("llama3-8b", "1x1xGH200", ()),
        (
            "llama3-70b",
            "1x8xA100-80",
            ("--num-stages", 1, *("--tensor-parallel-degrees", "[4]", "--zero-stages", "[3]"), *_RATIOS),
        ),
    ],
)
def test_large_networks_fit_small_machines_in_the_default_precision(model, cluster, more, tmp_path, capsys):
    out = tmp_path / "plan.json"
    asked = ("--model", model, "--cluster", cluster, "--global-batch-size", 16, "--seq-len", 2048, *more)
    run("plan", *asked, "--out", out)
    text = " ".join(capsys.readouterr().out.split())
    assert "in bf16-true with fp32 master weights (no --precision was given) with AdamW" in text
    assert "Fits in" in text
    assert "It does not fit" not in text
    assert "a forecast" not in text
    assert any(stage.offload.optimizer > 0 for stage in load(out).stages)


def test_others_are_priced_in_the_precision_of_their_tools(capsys):
    preset = ("--model", "gpt3-1.3b", "--seq-len", 256, "--global-batch-size", 64, "--cluster", "1x8xA100-80")
    run("plan", *preset, "--compare", "--json")
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["compare"]}
    assert lines["DDP"]["precision"] == "bf16-mixed"
    assert lines["FSDP"]["precision"] == lines["Megatron-LM, tuned"]["precision"] == ""
    run("plan", *preset, "--precision", "bf16-mixed", "--compare", "--json")
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["compare"]}
    assert lines["DDP"]["precision"] == ""
    assert lines["FSDP"]["precision"] == "bf16-true with fp32 master weights"


@pytest.mark.parametrize(
    ("cluster", "precision", "dtype"),
    [
        ("1x8xV100-32", "bf16-true", "bfloat16"),
        ("1x8xA100-40+1x8xT4", "bf16-mixed", "bfloat16"),
        ("1xL4", "64-true", "float64"),
    ],
)
def test_precisions_without_a_rate_are_refused_before_the_network_is_looked_at(capsys, cluster, precision, dtype):
    text = refused(capsys, *plan_arguments(model="nowhere:at_all", cluster=cluster, precision=precision))
    assert f"has no rate for {dtype}" in text
    assert "use a precision that it has" in text


PRESET = ("--model", "gpt3-1.3b", "--seq-len", "512", "--precision", "bf16-true")
ONE_STAGE = ("--max-stages", "1", "--schedules", '["1f1b"]', "--offload", "[]", "--tensor-parallel-degrees", "[1]")


def test_a_preset_is_described_without_torch():
    """Torch alone takes longer to import than a search takes."""
    arguments = ["plan", *PRESET, "--cluster", "1x2xL4", "--global-batch-size", "8", *ONE_STAGE, "--json"]
    text = f"import sys; from lightning_mist.cli import main; main({arguments!r}); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120)
    document, _, imported = found.stdout.rstrip().rpartition("\n")
    assert imported == "False"
    assert any("gpt3-1.3b is described by its sizes" in note for note in json.loads(document)["notes"])


def test_json_says_how_sure_the_plan_is(capsys):
    run("plan", *PRESET, "--cluster", "1x2xL4", "--global-batch-size", "8", *ONE_STAGE, "--json")
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["search"]["status"] in ("optimal", "explored")
    assert 0 < found["search"]["bound"] <= found["search"]["closed_form_seconds"] * (1 + 1e-9)
    assert found["search"]["gap"] >= 0
    assert found["search"]["certified"] is True
    assert any(note.startswith("HiGHS certifies") for note in found["notes"])
    assert found["search"]["stats"]["candidates"] > 0
    assert "mist: searching plans for 24 layers on 2 devices\nmist: that took " in shown.err


def test_a_network_of_seven_billion_parameters_is_planned_for_one_card(tmp_path, capsys):
    """What it needs beside the card goes to the host, and it is said why."""
    out = tmp_path / "plan.json"
    asked = {"model": "llama-7b", "cluster": "1xL4", "seq_len": 2048, "precision": "bf16-true", "out": out}
    run(*plan_arguments(**asked), "--json")
    (stage,) = load(out).stages
    assert stage.offload.optimizer == 1.0
    text = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "host_memory_limit is 76.8 GiB per node, 80% of the catalog's 96.0 GiB" in text
