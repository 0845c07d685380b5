import dataclasses

import pytest
import torch

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_litgpt import LitGPT
from benchmarks.accuracy.published_models import Arithmetic, BigCode, LlamaLike, Shape
from benchmarks.accuracy.published_parallel import ParallelDecoder
from benchmarks.accuracy.published_torchtune import TorchTune
from benchmarks.accuracy.published_training import Trainer, Training

SHAPE = Shape(
    hidden=512, ffn=2048, layers=3, heads=8, kv_heads=2, vocabulary=4096, head=64, is_tied=False, positions=128
)
TRAINING = Training(batch=2, length=64)


def parameters(model):
    shapes = [*model.root.values(), *(model.shape.layers * [*model.layer_shapes.values()])]
    return sum(torch.Size(shape).numel() for shape in shapes)


def run(model, training, steps=3):
    device = SimulatedDevice()
    with device:
        trainer = Trainer(device, model, training)
        after = []
        for _ in range(steps):
            trainer.step()
            after.append(device.allocator.requested)
    return device.peak_allocated, after[-1], trainer


def llama(**changes):
    return LlamaLike(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16), **changes)


@pytest.mark.sample
@pytest.mark.parametrize(
    "model",
    [
        llama(),
        llama(has_qkv_bias=True, copies_shifted=False),
        llama(is_gemma=True),
        llama(has_fast_kernels=True),
        BigCode(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16), keeps_cache=True),
        BigCode(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.float32, autocast=torch.bfloat16)),
        LitGPT(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16)),
        TorchTune(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16)),
        ParallelDecoder(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16, attention="sdpa")),
        ParallelDecoder(
            shape=SHAPE,
            arithmetic=Arithmetic(dtype=torch.float32, attention="eager"),
            has_two_norms=True,
            has_bias=True,
            rotary=0.25,
        ),
        LitGPT(
            shape=SHAPE, arithmetic=Arithmetic(dtype=torch.bfloat16), is_llama=False, is_parallel=True, has_bias=True
        ),
    ],
    ids=["llama", "qwen", "gemma", "fast", "bigcode", "gpt2-mixed", "litgpt", "torchtune", "falcon", "pythia", "neox"],
)
def test_between_steps_there_are_weights_and_moments(model):
    size = 4 if model.arithmetic.dtype == torch.float32 else 2
    _, after, _ = run(model, TRAINING)
    held = 3 * size * parameters(model) + model.buffer_bytes
    assert held <= after <= held + 1024 * 1024  # a batch, and nothing else of any size


def test_a_foreach_step_takes_as_much_again_as_the_weights_and_a_fused_one_nothing():
    model = llama()
    training = dataclasses.replace(TRAINING, batch=1, length=8)
    weights = 2 * parameters(model)
    peaks = {kind: run(model, dataclasses.replace(training, kind=kind))[0] for kind in ("foreach", "fused", "for-loop")}
    assert peaks["foreach"] == pytest.approx(5 * weights, rel=0.05)
    assert peaks["fused"] < 4.5 * weights
    assert peaks["for-loop"] < peaks["foreach"]


@pytest.mark.parametrize("world", [2, 4])
def test_a_sharded_run_holds_its_part_of_all_states(world):
    model = llama()
    _, after, trainer = run(model, dataclasses.replace(TRAINING, sharding="fsdp1", world=world))
    held = 3 * 2 * parameters(model) / world
    assert held <= after <= held + 1024 * 1024
    assert all(unit.gradient is None for unit in trainer.units)


def test_a_sharded_run_has_two_layers_and_the_root_whole_at_most():
    model = dataclasses.replace(llama(), shape=dataclasses.replace(SHAPE, layers=8, vocabulary=512))
    training = dataclasses.replace(TRAINING, batch=1, length=8, kind="fused", world=8)
    peak, after, _ = run(model, dataclasses.replace(training, sharding="fsdp1"))
    layer = 2 * sum(torch.Size(shape).numel() for shape in model.layer_shapes.values())
    root = 2 * sum(torch.Size(shape).numel() for shape in model.root.values())
    gradients = 2 * parameters(model) / 8
    # Two layers' weights, the root's, and of one layer its gradients one by one and put together.
    assert peak == pytest.approx(after + gradients + root + 4 * layer, rel=0.1)


def test_a_sharded_run_with_mixed_precision_has_float32_shards():
    model = LlamaLike(shape=SHAPE, arithmetic=Arithmetic(dtype=torch.float32, autocast=torch.bfloat16))
    _, after, trainer = run(model, dataclasses.replace(TRAINING, sharding="fsdp1", world=4))
    held = 3 * 4 * parameters(model) / 4
    assert held <= after <= held + 1024 * 1024
    assert {unit.flat.dtype for unit in trainer.units} == {torch.bfloat16}


def test_accumulation_without_reduction_keeps_whole_gradients():
    model = llama()
    training = dataclasses.replace(TRAINING, batch=1, length=8, sharding="fsdp1", world=8)
    once, _, _ = run(model, training)
    twice, after, _ = run(model, dataclasses.replace(training, accumulation=2))
    assert twice - once > parameters(model)
    assert after < 2 * parameters(model)


def test_recomputation_keeps_inputs_only():
    model = dataclasses.replace(llama(), shape=dataclasses.replace(SHAPE, layers=6, vocabulary=64))
    training = dataclasses.replace(TRAINING, batch=64, kind="fused")
    plain, _, _ = run(model, training)
    recomputed, _, _ = run(model, dataclasses.replace(training, recomputes=True))
    rows = 64 * 64 * SHAPE.hidden * 2
    assert plain - recomputed > 5 * 15 * rows


def test_state_in_bytes_and_state_elsewhere():
    weights = 2 * parameters(llama())
    _, eighth, _ = run(llama(), dataclasses.replace(TRAINING, is_8bit=True))
    assert eighth == pytest.approx(weights * (2 + 4 / 256), rel=0.03)
    _, paged, _ = run(llama(), dataclasses.replace(TRAINING, is_8bit=True, is_paged=True))
    assert paged == pytest.approx(weights, rel=0.03)


def test_steps_in_backward_never_have_all_gradients():
    training = dataclasses.replace(TRAINING, batch=1, length=8, optimizer="sgd")
    together, _, _ = run(llama(), training)
    one_by_one, _, _ = run(llama(), dataclasses.replace(training, steps_in_backward=True))
    largest = 2 * SHAPE.vocabulary * SHAPE.hidden
    weights = 2 * parameters(llama())
    assert together >= 2 * weights
    assert one_by_one < weights + 2 * largest + weights / 10


def test_replicas_keep_gradients_in_buckets():
    model = llama()
    _, alone, _ = run(model, TRAINING)
    _, together, _ = run(model, dataclasses.replace(TRAINING, sharding="ddp", world=2))
    assert together - alone == pytest.approx(2 * parameters(model), rel=0.01)
