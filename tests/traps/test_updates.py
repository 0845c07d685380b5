"""What is done to parameters, gradients, buffers and optimizers is as under DDP, or the plan is refused or stopped."""

import pytest

from tests.traps.run import cases, check

FIRST = {
    "buffers": ("batch-norm", "copied-through-data"),
    "finetuning": ("saves adapters", "unfreezes by hand", "adapter added late"),
    "gradients": ("logs-norms", "centralises-from-the-start", "warms-up"),
    "late": ("penalty on head", "normalised"),
    "manual": ("manual", "gan-saved"),
    "masters": ("plain", "clipped", "wide norms", "rebinds by vector", "edits groups", "penalised later, moved"),
    "offload": ("state halved", "weights clamped", "saved between steps", "cleared now and then"),
    "optimizers": ("put-step", "put-in-training", "eight", "late-norm", "own-rate"),
    "parameters": ("average", "samples", "overlapping/zero3"),
    "pieces": ("restarts/moved0",),
    "quantized": ("subclass", "packed under a key"),
}


@pytest.mark.parametrize(("family", "name", "plan"), cases(FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(outcome, family, name, plan):
    check(family, name, plan, outcome(family, name, plan))
