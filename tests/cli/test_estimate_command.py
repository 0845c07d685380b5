import json

import pytest

from lightning_mist.cli import estimate_command
from lightning_mist.errors import TraceError
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import from_json, plan_of, save
from tests.cli.networks import refused, run


def arguments(**changes):
    values = {"model": "tests.cli.networks:make_net", "cluster": "1x4xL4", "global_batch_size": 16, **changes}
    pairs = [(f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None]
    flags = [name for name, value in pairs if value is True]
    return ["estimate", *(item for pair in pairs if pair[1] is not True for item in pair), *flags]


def estimated(capsys):
    """What was printed as JSON, and the plan in it."""
    shown = json.loads(capsys.readouterr().out)
    return shown, from_json(json.dumps(shown["plan"]))


def test_degrees(capsys):
    run(*arguments(pipeline_stages=2, zero_stage=1, checkpointed_layers="all", json=True))
    shown, plan = estimated(capsys)
    assert (shown["verdict"], plan.num_stages, plan.num_microbatches) == ("fits", 2, 2)
    stage = plan.stages[0]
    assert (int(stage.zero_stage), stage.checkpointing.layers, stage.data_parallel_degree) == (1, 2, 2)


def test_a_plan_file_as_a_table(tmp_path, capsys):
    save(plan_of(4, world_size=4, global_batch_size=8), tmp_path / "plan.json")
    run(*arguments(plan=tmp_path / "plan.json", global_batch_size=None))
    assert capsys.readouterr().out.startswith("Fits in 22.5 GiB per device: stage 0 of 1 needs")
    assert "leave it out" in refused(capsys, *arguments(plan=tmp_path / "plan.json"))


def test_what_would_make_it_fit(capsys):
    # On CPU, where no context drowns what so small a network needs.
    run(*arguments(cluster="1x4xcpu:1GiB", memory_limit="5KiB", precision="bf16-mixed"))
    out, err = capsys.readouterr()
    assert "devices that share layers were not looked at" in err
    assert out.startswith(("Does not fit in 5.0 KiB per device", "Tight: it may not fit in 5.0 KiB per device"))
    assert "what would make it fit\n  " in out


def test_configure_optimizers_is_asked_unless_an_optimizer_is_named(capsys):
    run(*arguments(model="tests.cli.networks:make_own", json=True))
    own, _ = estimated(capsys)
    run(*arguments(model="tests.cli.networks:make_own", optimizer="RMSprop", json=True))
    named, _ = estimated(capsys)
    assert (own["optimizer"], named["optimizer"]) == ("SGD", "RMSprop")
    # Masters count: of SGD nothing else is kept.
    few, many = (item["stages"][0]["terms"]["optimizer_bytes"] for item in (own, named))
    assert 0 < few < many
    assert own["precision"] == "bf16-true with fp32 master weights"
    run(*arguments(json=True))
    assumed, _ = estimated(capsys)
    assert (assumed["optimizer"], "no optimizer was given: AdamW's needs are assumed" in assumed["notes"]) == (
        "AdamW",
        True,
    )


def test_devices_share_layers(capsys):
    run(*arguments(model="tests.cli.networks:make_wide", tensor_parallel_degree=2, json=True))
    assert estimated(capsys)[1].stages[0].mesh.tensor_parallel_degree == 2


def test_a_sweep(capsys):
    run(*arguments(sweep="microbatch_size=1,3 zero_stage=1,3"))
    shown = capsys.readouterr()
    assert shown.out.startswith("2 of 4 combinations fit within 22.5 GiB per device")
    assert shown.err.count("tracing") == 1
    run(*arguments(sweep="checkpointed_layers=0,all", json=True))
    found = json.loads(capsys.readouterr().out)
    kept = [item["estimate"]["plan"]["stages"][0]["checkpointed_layers"] for item in found]
    assert kept == [0, 4]


def test_a_sweep_goes_on_where_one_value_is_impossible(capsys):
    run(*arguments(model="llama-1.3b", closed_form=True, sweep="seq_len=0,8"))
    shown = capsys.readouterr().out
    assert "does not fit" in shown  # the other one
    assert "seq_len = 0: tokens per row are needed" in shown


def test_a_sweep_of_nothing_possible_is_an_error(capsys):
    with pytest.raises(SystemExit) as error:
        run(*arguments(sweep="pipeline_stages=3,5"))
    assert error.value.code == 2
    shown = capsys.readouterr()
    assert "0 of 2 combinations fit" in shown.out
    assert "sweep 'pipeline_stages=3,5': none of the 2 combinations is a plan: " in shown.err


def test_a_picture(tmp_path, capsys):
    run(*arguments(pipeline_stages=2, picture=tmp_path / "bytes.png", precision="32-true"))
    shown = capsys.readouterr()
    assert "largest tensors at the peak of stage" in shown.out
    assert "networks.py:" in shown.out
    assert f"picture written to {tmp_path / 'bytes.png'}" in shown.err
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


def test_a_closed_form_takes_a_moment(capsys, tmp_path):
    known = {"model": "llama-7b", "cluster": "1x8xA100-40", "global_batch_size": 8, "seq_len": 2048}
    run(*arguments(**known, precision="bf16-true", zero_stage=3, closed_form=True))
    shown = capsys.readouterr()
    assert "closed form (asked for)" in shown.out
    assert "tracing" not in shown.err
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 96, "rms_norm_eps": 1e-6}))
    named = {"model": tmp_path / "config.json", "seq_len": 16}
    run(*arguments(**named, tensor_parallel_degree=4, closed_form=True, json=True))
    estimate, plan = estimated(capsys)
    assert plan.num_layers == 4
    assert estimate["source"] == "closed form (asked for)"
    text = refused(capsys, *arguments(**named, cluster="1x16xL4", tensor_parallel_degree=16, closed_form=True))
    assert "tensor_parallel_degree = 16: it must divide 8 heads" in text


def test_what_cannot_be_traced_has_a_closed_form_where_sizes_are_known(capsys, monkeypatch):
    def fails(*args, **kwargs):
        raise TraceError("an operator has no fake kernel")

    monkeypatch.setattr(estimate_command, "describe_network", fails)
    run(*arguments(model="llama-1.3b", seq_len=128, precision="bf16-true", json=True))
    assert estimated(capsys)[0]["source"] == "closed form (an operator has no fake kernel)"
    assert "an operator has no fake kernel" in refused(capsys, *arguments())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"closed_form": True}, "a closed form needs a preset or a Hugging Face config.json"),
        ({"closed_form": True, "model": "falcon-7b"}, "share a norm: no closed form is about that"),
        ({"closed_form": True, "model": "llama-7b", "seq_len": None}, "tokens per row are needed"),
        ({"memory_limit": "22 bananas"}, "memory_limit: '22 bananas' is not a size"),
        ({"allocator": "expandable_segment:True"}, "the nearest is expandable_segments"),
        ({"memory_limit": "0"}, "memory_limit = 0: it must be more than nothing"),
        ({"memory_limit": "80GiB"}, "at most the 22.5 GiB of one L4"),
        ({"global_batch_size": 6}, "global_batch_size = 6 over data_parallel_degree = 4"),
        ({"global_batch_size": 0}, "global_batch_size = 0: at least one row is needed"),
        ({"tensor_parallel_degree": 3}, "4 devices with tensor x context x pipeline"),
        ({"pipeline_stages": 4, "chunks": 2, "schedule": "interleaved-1f1b"}, "4 layers in 8 stages"),
        ({"tensor_parallel_degree": 4}, "tensor_parallel_degree = 4"),
        ({"zero_stage": 5}, "zero_stage = 5: ZeRO has stages 0 to 3"),
        ({"checkpointed_layers": "some"}, "checkpointed_layers = 'some': a whole number is needed"),
        (
            {"offload": "weights=1"},
            "offload 'weights=1': write one of parameters, gradients, optimizer, activations, checkpoints and a ratio",
        ),
        ({"offload": "optimizer=2"}, "offload.optimizer = 2.0: a ratio lies in [0, 1]"),
        ({"plan": "plan.json", "zero_stage": 1}, "--plan plan.json with --zero-stage: a plan says it all"),
        ({"sweep": "zeros=1"}, "'zeros' cannot be gone through"),
        ({"sweep": "zero_stage=one"}, "zero_stage = 'one': a whole number is needed"),
        ({"picture": "a.bmp"}, "picture 'a.bmp': write a name that ends in .png"),
        ({"picture": "a.png", "sweep": "zero_stage=1"}, "--picture a.png with --sweep: one picture shows one plan"),
        ({"model": "gpt5"}, "model 'gpt5': not a preset"),
        ({"model": "gpt5", "seq_len": None}, "model 'gpt5': not a preset"),
        ({"model": "gpt5", "seq_len": None, "closed_form": True}, "model 'gpt5': not a preset"),
        ({"model": "none.json", "closed_form": True}, "model 'none.json': there is no such file"),
        ({"model": "none.json", "seq_len": None}, "model 'none.json': there is no such file"),
    ],
)
def test_nonsense_is_refused_in_one_line(capsys, changes, message):
    text = refused(capsys, *arguments(**{"seq_len": 8, **changes}))
    assert message in text
    assert "Traceback" not in text


def test_negative_sizes_are_refused(capsys):
    assert "'-1GiB' is not a size" in refused(capsys, *arguments(), "--memory-limit=-1GiB")


def test_a_plan_for_unlike_devices_has_a_limit_for_each_stage(tmp_path, capsys):
    mixed = {"cluster": "1xA100-40+1xL4", "global_batch_size": None}
    plan = plan_of(4, world_size=2, global_batch_size=8, pipeline_stages=2)
    save(plan, tmp_path / "plan.json")
    run(*arguments(**mixed, plan=tmp_path / "plan.json"), "--json")
    found, _ = estimated(capsys)
    has = [part.device.memory_bytes for part in parse_cluster(mixed["cluster"]).parts]
    assert [stage["limit"] for stage in found["stages"]] == [has[stage["devices"][0]] for stage in found["stages"]]
    assert found["verdict"] == "fits"
    assert "an estimate without --plan needs devices of one kind" in refused(capsys, *arguments(**mixed))
