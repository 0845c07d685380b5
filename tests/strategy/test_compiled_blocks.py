"""Blocks that the user compiles run compiled under the engine too.

Each case has a process of its own: torch never again compiles code that it has once met under a dispatch mode.
"""

import pytest
import torch
from torch import nn

from lightning_mist import MistStrategy
from tests.machine import assume_profile
from tests.strategy.test_strategy import LAYERS, Net, loader, one_stage, train
from tests.workers import apart

RUNS = []


def backend(graph, inputs):
    return lambda *args: RUNS.append(True) or graph(*args)


class Block(nn.Module):
    """Not a ``Sequential``: torch's ``compile`` of one in place compiles nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Compiled(Net):
    def __init__(self, how):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        for number, block in enumerate(self.blocks):
            if how == "in-place":
                block.compile(backend=backend)
            else:
                self.blocks[number] = torch.compile(block, backend=backend)


def compiled_runs(how, folder):
    """How often blocks ran compiled in one epoch."""
    profiles = str(assume_profile(folder, 1))
    strategy = MistStrategy(plan=one_stage(), master_weights=True, profile_directory=profiles)
    train(folder, strategy, Compiled(how), epochs=1, precision="bf16-true", limit_val_batches=0)
    return len(RUNS)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="master weights take torch 2.10")
@pytest.mark.parametrize("how", ["in-place", "wrapped"])
def test_every_step_but_the_metered_one_runs_compiled_blocks(tmp_path, how):
    assert apart(compiled_runs, how, tmp_path) == (len(loader()) - 1) * LAYERS
