"""What the trace counts is what a meter finds in a plain training step, to the byte."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mist.model import ModelSpec, trace_model
from lightning_mist.model.spec import MICROBATCH, SEQUENCE
from lightning_mist.runtime.recording import StorageMeter, state_tensors
from tests import zoo
from tests.tiers import tiered

ROWS = 4


def gradient_bytes(spec: ModelSpec) -> list[int]:
    """Bytes of the trained parameters of the head, every layer and the tail."""
    blocks = spec.module_map.blocks
    made = [0] * (len(blocks) + 2)
    for use in spec.module_map.parameters:
        parts = {
            region + 1 if region + 1 < len(blocks) or any(name.startswith(block) for block in blocks) else region + 2
            for name, _, regions in use.slots
            for region in regions
        }
        if use.requires_grad and parts:
            made[max(parts)] += math.prod(use.shape) * getattr(torch, use.dtype).itemsize
    return made


def counted(spec: ModelSpec, *, gradients_exist: bool) -> tuple[int, int]:
    """Peaks of forward and backward of a whole batch in one process, beyond what was there before."""
    sizes = {MICROBATCH: ROWS, SEQUENCE: spec.sequence_length or 1}
    parts = [spec.head, *(spec.layers[kind] for kind in spec.kinds), spec.tail]
    saved = [int(part.saved_bytes.subs(sizes)) for part in parts]
    made = gradient_bytes(spec)
    forward = max(sum(saved[:i]) + int(part.forward_peak_bytes.subs(sizes)) for i, part in enumerate(parts))
    backward = 0
    for i, part in enumerate(parts):
        peak = part.backward_peak_bytes if gradients_exist else part.first_backward_peak_bytes
        later = 0 if gradients_exist else sum(made[i + 1 :])
        backward = max(backward, sum(saved[: i + 1]) + later + int(peak.subs(sizes)))
    return forward, backward


def metered(module: nn.Module, batch: Any) -> tuple[int, int]:
    meter = StorageMeter()
    meter.observe(state_tensors(module, (), batch))
    before = meter.current_bytes
    with meter:
        loss = zoo.loss_of(zoo.step(module)(batch))
        forward = meter.peak_bytes - before
        meter.reset()
        loss.backward()
    return forward, meter.peak_bytes - before


@pytest.mark.parametrize(
    "name", tiered(["nano", "bert", "gpt2_eager", "tuple_dict", "encoder"], ["nano", "tuple_dict"])
)
def test_counted_is_metered(name: str) -> None:
    module, make_batch = zoo.make(name)
    if name == "gpt2_eager":
        module.model.config.use_cache = False  # a cut module has no key-value caches, a plain step would keep them
    batch = make_batch(ROWS)
    spec = trace_model(module, batch, call=zoo.step(module), optimizer=torch.optim.SGD)
    metered(module, batch)  # the module fills its own caches
    for parameter in module.parameters():
        parameter.grad = None
    assert metered(module, batch) == counted(spec, gradients_exist=False)
    assert metered(module, batch) == counted(spec, gradients_exist=True)
