import json

import pytest
import torch
from torch import nn

from lightning_mist.model.presets.named_models import PRECISIONS
from lightning_mist.model.sources import with_adapters
from lightning_mist.model.sources.text_sources import open_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()


def make_net():
    return Net(), torch.ones(2, 3)


def make_without_values():
    with torch.device("meta"):
        return make_net()[0].requires_grad_(False), torch.ones(2, 3, device="cpu")


def make_module_only():
    return Net()


def make_without_step():
    return nn.Linear(3, 1), torch.ones(2, 3)


def open_(text, **changes):
    arguments = {"batch_rows": 2, "sequence_length": 8, "precision": "32-true"}
    return open_model(text, **{**arguments, **changes})


def configuration(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def test_preset():
    source = open_("gpt3-22b", sequence_length=64)
    assert source.name == "gpt3-22b"
    assert [tuple(tensor.shape) for tensor in source.batch] == [(2, 64), (2, 64)]
    assert sum(parameter.numel() for parameter in source.module.parameters()) > 22 * 10**9
    assert len(source.module.blocks) == 48


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_run_in_the_precision_asked_for(tmp_path, precision):
    source = open_(configuration(tmp_path), precision=precision)
    kept = {parameter.dtype for parameter in source.module.parameters()}
    expected = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    assert kept == {expected.get(precision, torch.float32)}
    seen = []
    for module in source.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    source.call(source.batch)
    mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    assert set(seen) == {mixed.get(precision, next(iter(kept)))}


def test_a_function_may_build_a_module_without_values():
    source = open_("tests.model.sources.test_text_sources:make_without_values", precision="bf16-true")
    weight = source.module.layer.weight
    assert (weight.device.type, weight.dtype, weight.untyped_storage().nbytes()) == ("cpu", torch.bfloat16, 2)
    assert not weight.requires_grad
    assert source.call(source.batch) == 0


def test_a_module_is_changed_before_it_is_traced(tmp_path):
    for text in ("gpt3-1.3b", configuration(tmp_path), "tests.model.sources.test_text_sources:make_net"):
        source = open_(text, change=lambda module: module.requires_grad_(False))
        assert not any(item.requires_grad for item in source.module.parameters())


def test_configuration_file(tmp_path):
    source = open_(configuration(tmp_path))
    assert type(source.module.model).__name__ == "LlamaForCausalLM"
    assert source.module.training
    assert torch.isfinite(source.call(source.batch))


def test_configuration_file_without_an_architecture_is_a_language_model(tmp_path):
    source = open_(configuration(tmp_path, architectures=None))
    assert type(source.module.model).__name__ == "LlamaForCausalLM"


def test_function():
    source = open_("tests.model.sources.test_text_sources:make_net", sequence_length=None, precision="64-true")
    assert source.name == "Net"
    assert source.module.layer.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("gpt3-23b", {}, "model 'gpt3-23b': not a preset, .* did you mean .*'gpt3-22b'"),
        ("gpt3-22b", {"sequence_length": None}, "seq_len = None: tokens per row are needed; give --seq-len 2048"),
        ("gpt3-22b", {"precision": "bf16"}, "precision 'bf16': known precisions are 32-true, bf16-mixed"),
        ("none/config.json", {}, "model 'none/config.json': there is no such file"),
        ("no_such_module:make", {}, "cannot be imported .*No module named 'no_such_module'"),
        ("tests.model.sources.test_text_sources:absent", {}, "cannot be imported .*no attribute 'absent'"),
        (
            "tests.model.sources.test_text_sources:make_module_only",
            {},
            "returned Net: it must return a module and a batch",
        ),
        ("tests.model.sources.test_text_sources:make_without_step", {}, "returned a Linear without training_step"),
    ],
)
def test_what_names_nothing_is_refused(text, changes, message):
    with pytest.raises(ValueError, match=message):
        open_(text, **changes)


def test_configurations_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"seq_len = 64: .* at most 32 positions; give --seq-len 32"):
        open_(configuration(tmp_path), sequence_length=64)
    with pytest.raises(ValueError, match="is a ViTForImageClassification: only language models"):
        open_(configuration(tmp_path, architectures=["ViTForImageClassification"]))
    with pytest.raises(ValueError, match="is not a configuration that transformers knows"):
        open_(configuration(tmp_path, model_type="no-such-type"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        open_(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_true_precisions_are_those_of_batches_and_of_what_steps_make(precision, dtype):
    source = open_(f"{__name__}:make_net_that_adds", precision=precision)
    assert source.batch[0].dtype == dtype
    assert source.batch[1].dtype == torch.long
    source.call(source.batch)
    assert source.module.made == dtype
    assert torch.get_default_dtype() == torch.float32


def make_net_that_adds():
    return Adding(), (torch.ones(2, 3), torch.zeros(2, dtype=torch.long))


class Adding(Net):
    def training_step(self, batch, batch_idx):
        more = torch.ones(3)
        self.made = more.dtype
        return self.layer(batch[0] + more).mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)


def layers():
    return nn.Sequential(nn.Embedding(5, 8), Attention(), Attention())


def trained(module):
    return {name: tuple(item.shape) for name, item in module.named_parameters() if item.requires_grad}


@pytest.mark.parametrize(
    ("targets", "names"), [((), {"q_proj": 8, "v_proj": 4}), (("k_proj",), {"k_proj": 4})], ids=["default", "named"]
)
def test_adapters_alone_are_trained(targets, names):
    found = trained(with_adapters(layers(), 2, targets))
    assert len(found) == 2 * 2 * len(names)
    for number in (1, 2):
        for name, width in names.items():
            shapes = sorted(shape for key, shape in found.items() if key.startswith(f"{number}.{name}."))
            assert shapes == sorted([(2, 8), (width, 2)])


def test_gradients_reach_all_adapters_and_nothing_else():
    module = with_adapters(nn.ModuleDict({"query": nn.Linear(8, 4).double()}), 2)
    module["query"](torch.ones(3, 8, dtype=torch.double)).sum().backward()
    has_gradient = {name for name, item in module.named_parameters() if item.grad is not None}
    assert has_gradient == set(trained(module))


@pytest.mark.parametrize(
    ("rank", "targets", "message"),
    [
        (0, (), "lora_rank = 0: the width of adapters must be positive"),
        (2, ("w1",), "no linear layer is named w1; there are k_proj, q_proj, v_proj"),
    ],
)
def test_what_makes_no_adapters_is_refused(rank, targets, message):
    with pytest.raises(ValueError, match=message):
        with_adapters(layers(), rank, targets)


def test_a_network_without_attention_needs_names():
    with pytest.raises(ValueError, match=r"lora_targets: .*queries and values; there are 0, 1"):
        with_adapters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
