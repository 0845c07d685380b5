import json

import pytest

from lightning_mist.cli.network import NetworkRequest, closed_network, describe_network, trace_network
from lightning_mist.model.presets.named_models import PRESETS

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
CONFIGURATION = {**SIZES, "vocab_size": 96, "rms_norm_eps": 1e-6}


def asked(model, **changes):
    named = {"model": str(model), "precision": "32-true", "optimizer": "AdamW", "device_kind": "cpu"}
    return NetworkRequest(**{**named, "rows": 2, "seq_len": 16, "degrees": (), **changes})


def test_a_function_s_module_is_traced_in_another_process(capfd):
    found = trace_network(asked("tests.cli.networks:make_wide", seq_len=None, degrees=(2,)))
    assert (found.num_layers, found.optimizer.name) == (4, "AdamW")
    assert {split.degree for split in found.splits} == {2}
    told = capfd.readouterr().err
    assert "mist: tracing " in told
    assert "mist: finding out how 2 devices could share layers" in told


def test_adapters_alone_are_trained():
    function = "tests.cli.networks:make_wide"
    whole = describe_network(asked(function))
    adapted = describe_network(asked(function, lora_rank=1, lora_targets="1, 3"))
    assert all(item.trainable for item in whole.parameters)
    frozen = [item.numel for item in adapted.parameters if not item.trainable]
    trained = [item.numel for item in adapted.parameters if item.trainable]
    assert sum(frozen) == sum(item.numel for item in whole.parameters)
    assert trained == [8, 32, 32, 8] * 4
    assert adapted.num_layers == whole.num_layers


def test_layers_without_adapters_are_no_networks():
    with pytest.raises(ValueError, match="lora_targets = 'q_proj' without lora_rank: give --lora-rank 16, too"):
        asked("llama-7b", lora_targets="q_proj")


def test_presets_and_configurations_have_closed_forms(tmp_path):
    found = closed_network(asked("llama-7b", seq_len=2048))
    assert (found.name, found.num_layers, found.sequence_length) == ("llama-7b", PRESETS["llama-7b"].layers, 2048)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGURATION))
    found = closed_network(asked(path, degrees=(4,)))
    assert (found.num_layers, found.batch_rows, {split.degree for split in found.splits}) == (4, 2, {4})


@pytest.mark.parametrize(
    ("changes", "degrees"),
    [
        ({"seq_len": 8192}, ()),
        ({"seq_len": 8192, "contexts": (2,)}, (2,)),
        ({"seq_len": 32_768}, (2, 4, 8)),
        ({"seq_len": 32_768, "contexts": ()}, ()),
    ],
)
def test_devices_may_share_rows_that_are_long(changes, degrees):
    card = {"precision": "bf16-mixed", "device_kind": "cuda", "capability": (9, 0)}
    found = describe_network(asked("llama3-8b", rows=1, **card, **changes))
    assert tuple(split.degree for split in found.module_map.contexts) == degrees


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tests.cli.networks:make_net"}, "needs a preset or a Hugging Face config.json; trace it instead"),
        ({"seq_len": None}, "tokens per row are needed; give --seq-len 2048"),
        ({"seq_len": 0}, "with seq_len = 0: tokens per row are needed"),
        ({"optimizer": "Adamm"}, "optimizer 'Adamm' is not a class in torch.optim"),
        ({"lora_rank": 4}, "closed_form with lora_rank: sizes alone say nothing of adapters"),
        ({"optimizer": "lr_scheduler"}, "optimizer 'lr_scheduler' is not a class in torch.optim"),
    ],
)
def test_what_has_no_closed_form_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        closed_network(asked(**{"model": "llama-7b", **changes}))


def test_a_configuration_without_sizes_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES))
    with pytest.raises(ValueError, match=r"config\.json': .*without vocab_size"):
        closed_network(asked(path))
