from dataclasses import replace

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError
from lightning_mist.estimate import estimate_memory
from lightning_mist.estimate.closed_form import ClosedForm, Split, closed_spec, second_opinion, with_second_opinion
from lightning_mist.estimate.transformer_sizes import TransformerDims, dims_of, module_dims, shape_dims
from lightning_mist.hardware import parse_cluster
from lightning_mist.model import trace_model
from lightning_mist.model.sources.reference_decoder import LanguageModel, hollow
from lightning_mist.model.spec import MICROBATCH, SEQUENCE
from lightning_mist.plan import StageMesh, plan_of
from tests.cost.memory.test_memory_model import make_plan
from tests.estimate.test_transformer_sizes import LENGTH, PUBLISHED, SHAPE, sizes
from tests.specs import ADAMW
from tests.tiers import tiered

LLAMA = TransformerDims(hidden=4096, ffn=14336, layers=4, heads=32, key_value_heads=8, vocabulary=128256)
ROWS, TOKENS = 2, 2048


def at(expression, rows=ROWS, length=TOKENS):
    return int(expression.subs({MICROBATCH: rows, SEQUENCE: length}))


def spec_of(dims, *, degrees=(), precision="bf16-true", rows=ROWS, length=TOKENS, kind="cuda"):
    return closed_spec(
        dims,
        optimizer=ADAMW,
        precision=precision,
        rows=rows,
        sequence_length=length,
        degrees=degrees,
        device_kind=kind,
        name="network",
    )


@pytest.mark.parametrize(("degree", "sequence"), [(1, False), (2, True), (8, True)])
def test_a_layer_keeps_what_the_published_formula_says(degree, sequence):
    """But for the inputs of matrices, which torch keeps gathered, and log-sum-exps, which the paper leaves out."""
    h, f, share = LLAMA.hidden, LLAMA.ffn, LLAMA.groups / LLAMA.heads
    published = TOKENS * ROWS * h * (12 + 4 * share + 8 * f / h) / degree
    gathered = 4 * h * (1 - 1 / degree) * TOKENS * ROWS
    found = at(ClosedForm(dims=LLAMA).layer_bytes(Split(degree, sequence)))
    assert found == published + gathered + 4 * LLAMA.heads / degree * TOKENS * ROWS


def test_a_network_is_as_large_as_the_published_formulas_say():
    """Parameters, and activations of a token with its id of 8 bytes, on one device (arXiv:2411.06465)."""
    spec = spec_of(LLAMA)
    h, f, v, layers, share = LLAMA.hidden, LLAMA.ffn, LLAMA.vocabulary, LLAMA.layers, LLAMA.groups / LLAMA.heads
    tables, attention_and_norms = 2 * v * h + h, 2 * h**2 * (1 + share + 1 / h)
    assert sum(item.numel for item in spec.parameters) == tables + layers * (attention_and_norms + 3 * h * f)
    kept = at(spec.head.saved_bytes + layers * spec.layers[0].saved_bytes + spec.tail.saved_bytes)
    token = h * ((12 + 4 * share + 8 * f / h) * layers + 4 * (1 + v / h)) + 8
    assert kept == pytest.approx(ROWS * TOKENS * token, rel=0.01)


def made(family, **more):
    """A small published network, as transformers makes it."""
    transformers = pytest.importorskip("transformers")
    shrunk = {"hidden_size": 256, "intermediate_size": 448, "num_attention_heads": 8, "num_key_value_heads": 8}
    shrunk |= {"vocab_size": 512, "pad_token_id": 0, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family, **{**shrunk, **more})
    torch.manual_seed(0)
    return config, transformers.AutoModelForCausalLM.from_config(config)


def kept_by(module):
    """Bytes of what autograd keeps of a step beside parameters."""
    ids, seen = torch.randint(0, 512, (2, 64)), {}
    own = {item.untyped_storage().data_ptr() for item in (*module.parameters(), *module.buffers())}
    tensors = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        tensors.append(tensor)  # no address is used twice
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return sum(seen.values())


_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1}
_LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"num_key_value_heads": 4}),
        ("qwen3", {"head_dim": 32}),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
        ("olmoe", {"num_experts": 16, "intermediate_size": 128, **_EXPERTS, "eos_token_id": 1}),
        ("qwen2_moe", {"num_experts": 16, "shared_expert_intermediate_size": 512, **_EXPERTS}),
        ("qwen3_moe", {"num_experts": 16, "head_dim": 32, **_EXPERTS}),
        ("deepseek_v3", {"n_routed_experts": 16, "first_k_dense_replace": 0, "q_lora_rank": 96, **_LATENT, **_EXPERTS}),
        ("glm4_moe", {"n_routed_experts": 16, "head_dim": 32, "first_k_dense_replace": 0, **_EXPERTS}),
    ],
)
def test_a_layer_keeps_about_what_autograd_keeps(family, more, dtype):
    """Of the modules that transformers makes, on a CPU: a layer more, with experts that tokens are sent to."""
    each = []
    for layers in (1, 2):
        config, module = made(family, **{**more, "num_hidden_layers": layers})
        each.append(kept_by(module.to(dtype).train()))
    precision = "bf16-true" if dtype is torch.bfloat16 else "32-true"
    dims = dims_of(config)
    form = ClosedForm(dims=dims, precision=precision, device_kind="cpu")
    found = at(form.layer_bytes(sparse=dims.experts is not None), 2, 64)
    assert 0.97 < found / (each[1] - each[0]) < 1.15


@pytest.mark.parametrize(
    ("name", "least"), [("Mixtral-8x7B-v0.1", 86), ("Qwen3-30B-A3B", 56), ("DeepSeek-V2-Lite", 29)]
)
def test_mixtures_of_experts_need_what_their_parameters_need(name, least):
    """At least 2 bytes of weight for each parameter, in GiB, whatever else there is."""
    family, stated = PUBLISHED[name]
    spec = spec_of(dims_of({"model_type": family, **stated}), rows=1)
    plan = plan_of(spec.num_layers, world_size=8, global_batch_size=8)
    estimate = estimate_memory(spec, None, plan, parse_cluster("1x8xA100-80"), advise=False)
    assert estimate.worst.term("parameter_bytes") >= least * 2**30
    assert estimate.verdict == "does not fit"


def test_layers_with_and_without_experts_are_of_two_kinds():
    family, stated = PUBLISHED["DeepSeek-V3"]
    spec = spec_of(dims_of({"model_type": family, **stated}), degrees=(8,))
    assert spec.kinds == (0,) * 3 + (1,) * 58
    assert [layer.kind for layer in spec.layers] == ["Layer", "SparseLayer"]
    (split, _) = spec.splits
    whole = sum(item.bytes for item in spec.parameters)
    assert whole / 8 < sum(split.parameter_bytes) < whole / 7.8


def test_tensor_parallel_plans_need_less():
    dims = replace(LLAMA, hidden=256, ffn=704, heads=8, key_value_heads=4, vocabulary=1024)
    alone = make_plan([4])
    mesh = StageMesh(devices=(0, 1), tensor_parallel_degree=2, sequence_parallel=True)
    shared = replace(alone, stages=(replace(alone.stages[0], mesh=mesh),))
    network = spec_of(dims, degrees=[2], rows=4, length=64)
    whole, part = (stage_memory(network, plan)[0].peak_bytes for plan in (alone, shared))
    assert part < 0.6 * whole
    with pytest.raises(PlanError, match="tensor_parallel_degree = 8: it must divide 8 heads, 4 heads of keys"):
        spec_of(dims, degrees=[8])


@pytest.mark.parametrize("groups", tiered([None, 4], [4]))
def test_layers_and_peaks_are_near_those_of_a_trace(groups):
    shape = replace(SHAPE, hidden=128, ffn=352, layers=2, heads=8, vocabulary=512, key_value_heads=groups)
    module = hollow(lambda: LanguageModel(shape, 128), dtype=torch.bfloat16)
    ids = torch.zeros(4, 128, dtype=torch.long)
    traced = trace_model(
        module,
        (ids, ids.clone()),
        call=lambda batch: module.training_step(batch, 0),
        precision="bf16-true",
        device_kind="cuda",
    )
    dims = shape_dims(shape, 128)
    assert "as a closed form of its sizes says" in second_opinion(traced, dims, "cuda")
    closed = spec_of(dims, rows=4, length=128)
    plan = plan_of(2, world_size=1, global_batch_size=4)
    peaks = [stage_memory(spec, plan)[0].peak_bytes for spec in (traced, closed)]
    assert 1 < peaks[1] / peaks[0] < 1.2


def test_precisions_are_known():
    with pytest.raises(ValueError, match="precision = '32-mixed': closed forms know 16-true"):
        ClosedForm(dims=LLAMA, precision="32-mixed")


@pytest.mark.thorough
def test_a_traced_transformer_gets_a_second_opinion():
    module = LanguageModel(SHAPE, LENGTH)
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    traced = trace_model(module, (ids, ids.clone()), call=lambda batch: module.training_step(batch, 0))
    noted = with_second_opinion(traced, module, "cpu")
    assert noted.notes[:-1] == traced.notes
    assert noted.notes[-1].startswith("second opinion: each layer keeps ")
    dims = module_dims(module, LENGTH)
    doubled = replace(dims, ffn=2 * dims.ffn)
    assert "the trace" in second_opinion(traced, doubled, "cpu")
    assert "less: the module computes by other operators than it assumes" in second_opinion(traced, doubled, "cpu")
    # A module that does not say its sizes, or says those of another number of layers, gets none.
    assert with_second_opinion(traced, torch.nn.Linear(2, 2), "cpu") is traced
    other = hollow(lambda: LanguageModel(replace(SHAPE, layers=3), LENGTH))
    assert with_second_opinion(traced, other, "cpu") is traced


def test_a_file_of_experts_is_refused_where_its_family_is_not_said():
    with pytest.raises(ValueError, match="num_local_experts"):
        dims_of({**sizes(64, 128, 2, 4, 96), "rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2})
