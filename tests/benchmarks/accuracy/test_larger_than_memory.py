import pytest
import torch

from benchmarks.accuracy.large import build
from benchmarks.accuracy.larger_than_memory import sample_of


def test_a_sample_is_that_of_the_stage_that_needs_most():
    stage = {"zero_stage": 0, "checkpointed_layers": 2}
    run = {
        "limit": 95,
        "all_bytes": 100,
        "plan": {"stages": [stage, {**stage, "zero_stage": 3}], "num_microbatches": 4},
        "predicted_bytes": [90, 80],
        "measured_bytes": [70, 82],
        "losses": [5.0] * 5 + [4.0] * 2 + [3.0] * 5,
    }
    sample = sample_of("empty", "everything", run)
    assert sample["plan"] == "2 stages, 4 microbatches, ZeRO 3, 4 layers recomputed"
    assert (sample["predicted_peak_bytes"], sample["measured_peak_bytes"]) == (80, 82)
    assert sample["memory_error"] == pytest.approx(-2 / 82)
    assert (sample["first_loss"], sample["last_loss"]) == (5.0, 3.0)


def test_parameters_and_their_state_take_three_times_their_bytes():
    module = build(2, 32, 16)
    optimizer = module.configure_optimizers()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    module._loss((tokens, tokens)).backward()
    optimizer.step()
    held = list(module.parameters())
    state = [optimizer.state[p]["momentum_buffer"] for p in held]
    assert sum(t.numel() for t in [*held, *(p.grad for p in held), *state]) == 3 * sum(p.numel() for p in held)
