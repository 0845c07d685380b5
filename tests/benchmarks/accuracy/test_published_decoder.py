"""The traced decoder: choices of how the same numbers are made change what is kept, not the numbers."""

import pytest
import torch

from benchmarks.accuracy.published_decoder import Decoder, DecoderSizes

SIZES = {"hidden": 32, "ffn": 64, "layers": 2, "heads": 4, "vocabulary": 96}
LLAMA = {"feed_forward": "swiglu", "norm": "rmsnorm", "positions": "rotary", "key_value_heads": 2}
LENGTH = 24


def trained(dtype=torch.float64, **options):
    torch.manual_seed(0)
    module = Decoder(DecoderSizes(**SIZES, **options), LENGTH).to(dtype)
    tokens = torch.randint(0, 96, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    found = module.training_step((tokens, tokens.roll(-1, 1)), 0)
    loss = found["loss"] if isinstance(found, dict) else found
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"fused_loss": "apart"},
        {"fused_loss": "in place"},
        {"fused_loss": "with its product"},
        {"keeps_cache": True},
        {"keeps_scores": True},
    ],
)
def test_losses_and_what_is_kept_beside_change_no_gradient(options):
    expected, gradients = trained()
    loss, found = trained(**options)
    assert loss == pytest.approx(float(expected), rel=1e-6)  # fused losses are summed in float32
    for mine, wanted in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-9)


def test_norms_and_rotation_in_float32_are_the_same():
    expected, _ = trained(torch.float32, **LLAMA)
    wide = {**LLAMA, "norm": "rms by operators", "positions": "rotary in float32"}
    torch.manual_seed(0)
    plain = Decoder(DecoderSizes(**SIZES, **LLAMA), LENGTH)
    joint = Decoder(DecoderSizes(**SIZES, **wide), LENGTH)
    weights = plain.state_dict()
    for index in range(2):
        name = f"blocks.{index}.attention."
        parts = [weights.pop(f"{name}{part}.weight") for part in ("query", "key", "value")]
        weights[f"{name}query_key_value.weight"] = torch.cat(parts)
    joint.load_state_dict(weights)
    tokens = torch.randint(0, 96, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    found = joint.training_step((tokens, tokens.roll(-1, 1)), 0)
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-4)
