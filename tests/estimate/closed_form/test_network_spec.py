"""Networks of which only sizes are known, against traces of networks of these sizes."""

from dataclasses import replace
from functools import lru_cache, partial

import pytest
import sympy
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import CPU, CUDA
from lightning_mist.estimate.closed_form.network_spec import closed_form_spec
from lightning_mist.estimate.closed_form.transformer_form import LOSSES, ClosedForm
from lightning_mist.model import trace_model
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from tests.cost.memory.test_memory_model import make_plan
from tests.cost.transformers import GPT, LLAMA, Transformer, step, tokens
from tests.specs import ADAMW
from tests.tiers import tiered

ROWS, LENGTH = 2, 128
SIZES = {"hidden": 256, "heads": 4, "layers": 2, "vocabulary": 1000}
SWIGLU = replace(LLAMA, **SIZES, ffn=704, key_value_heads=2)
GELU = replace(GPT, **SIZES, ffn=1024, positions=LENGTH)
DROPOUT = replace(GELU, dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


@lru_cache(maxsize=8)
def both(dims, precision, device):
    module = Transformer(dims).to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    how = {"context": AUTOCAST} if precision.endswith("mixed") else {}
    traced = trace_model(
        module, tokens(ROWS, LENGTH), call=step(module), optimizer=torch.optim.AdamW, precision=precision,
        device_kind=device, **how,
    )  # fmt: skip
    form = ClosedForm(
        dims=dims,
        optimizer=traced.optimizer,
        sequence_length=LENGTH,
        batch_rows=ROWS,
        precision=precision,
        operators={"cpu": CPU, "cuda": CUDA}[device],
        loss="same" if precision == "bf16-true" else None,
    )
    return traced, closed_form_spec(form)


CASES = [
    (SWIGLU, "bf16-true", "cuda"),
    (SWIGLU, "bf16-mixed", "cuda"),
    (GELU, "32-true", "cpu"),
    (DROPOUT, "bf16-true", "cuda"),
]
every = pytest.mark.parametrize(("dims", "precision", "device"), tiered(CASES, CASES[::2]))


def at(expression):
    return float(sympy.sympify(expression).subs({MICROBATCH: ROWS, SEQUENCE: LENGTH}))


@every
def test_what_is_kept_is_what_a_trace_says(dims, precision, device):
    traced, closed = both(dims, precision, device)
    for name in ("saved_bytes", "checkpointed_saved_bytes"):
        assert at(getattr(closed.layers[0], name)) == at(getattr(traced.layers[0], name))
        assert at(getattr(closed.head, name)) == at(getattr(traced.head, name))
        # Beside, a loss and the weight of its mean.
        assert at(getattr(closed.tail, name)) == pytest.approx(at(getattr(traced.tail, name)), abs=16)
    assert at(closed.shared_saved_bytes) == at(traced.shared_saved_bytes)


@every
@pytest.mark.parametrize("checkpointed", [0, 2])
@pytest.mark.parametrize(("zero", "microbatches"), [(0, 1), (1, 1), (1, 4)])
def test_peaks_are_near_those_of_a_trace(dims, precision, device, checkpointed, zero, microbatches):
    plan = make_plan([2], rows=ROWS, zero=zero, checkpointed=checkpointed, microbatches=microbatches)
    (expected,), (found,) = (stage_memory(spec, plan) for spec in both(dims, precision, device))
    for term in ("parameter_bytes", "optimizer_bytes", "batch_bytes"):
        assert dict(found.terms)[term] == dict(expected.terms)[term]
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03)


def test_floating_point_operations_of_matrices():
    traced, closed = both(GELU, "32-true", "cpu")
    for part in (lambda spec: spec.layers[0], lambda spec: spec.tail):
        for name in ("forward_flops", "weight_flops", "weight_bytes"):
            assert at(getattr(part(closed), name)) == at(getattr(part(traced), name))


def closed(dims=SWIGLU, degrees=(), **changes):
    form = ClosedForm(dims=dims, optimizer=ADAMW, sequence_length=LENGTH, **changes)
    return closed_form_spec(form, degrees)


@pytest.mark.parametrize("dims", [SWIGLU, GELU, replace(GELU, tied=True)], ids=["swiglu", "gelu", "tied"])
def test_parameters(dims):
    spec = closed(dims)
    assert sum(item.numel for item in spec.parameters) == dims.parameters
    assert sum(item.bytes for item in spec.parameters) == 2 * dims.parameters
    (memory,) = stage_memory(spec, make_plan([2], rows=1))
    assert dict(memory.terms)["parameter_bytes"] == 2 * dims.parameters


@pytest.mark.parametrize("dims", [SWIGLU, GELU], ids=["swiglu", "gelu"])
def test_tensor_parallel_ranks(dims):
    spec = closed(dims, degrees=(1, 2))
    assert {(item.degree, item.sequence_parallel) for item in spec.splits} == {(2, False), (2, True)}
    part, along = spec.split(2), spec.split(2, True)
    layer = sum(item.numel for item in part.parameters if item.name.startswith("layers.0."))
    assert layer == dims.layer_parameters(2)
    assert at(along.layers[0].saved_bytes) < at(part.layers[0].saved_bytes) < at(spec.layers[0].saved_bytes)
    assert at(along.boundaries[0][0].bytes) == at(part.boundaries[0][0].bytes) / 2
    # Ranks share the vocabulary, and so the scores.
    assert at(part.tail.saved_bytes) < at(spec.tail.saved_bytes)


def test_loss_chains_differ_by_their_bytes_per_score():
    scores = ROWS * LENGTH * SWIGLU.vocabulary
    found = {name: at(closed(loss=name).tail.saved_bytes) for name in LOSSES}
    for name, chain in LOSSES.items():
        assert found[name] - found["same"] == (chain.kept - LOSSES["same"].kept) * scores
    double = at(closed(precision="64-true").tail.saved_bytes) - at(closed(precision="32-true").tail.saved_bytes)
    assert double >= 4 * scores


def test_it_says_that_nothing_was_traced():
    (note,) = closed().notes
    assert note.startswith("nothing was traced: a closed form of 2 layers with hidden width 256")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "8-true"}, "precision = '8-true'"),
        ({"precision": "32-mixed"}, "precision = '32-mixed'"),
        ({"loss": "focal"}, "loss = 'focal': known chains are same, upcast"),
        ({"degrees": (8,)}, "tensor_parallel_degree = 8: it must divide 4 heads, 2 heads of keys"),
    ],
)
def test_what_it_does_not_know(changes, message):
    with pytest.raises((ValueError, PlanError), match=message):
        closed(**changes)
