"""Blocks that the user compiles run compiled under the engine too."""

import pytest
import torch
from torch import nn

from lightning_mist import MistStrategy
from tests.strategy.test_strategy import LAYERS, Net, _end_of_the_process_group, loader, one_stage, profiles, train

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice on loggers, workers and small datasets

__all__ = ["_end_of_the_process_group", "profiles"]

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
            if how == "in place":
                block.compile(backend=backend)
            else:
                self.blocks[number] = torch.compile(block, backend=backend)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_every_step_but_the_metered_one_runs_compiled_blocks(tmp_path, profiles, how):
    RUNS.clear()
    strategy = MistStrategy(plan=one_stage(), master_weights=True, profile_directory=profiles)
    train(tmp_path, strategy, Compiled(how), epochs=1, precision="bf16-true", limit_val_batches=0)
    assert len(RUNS) == (len(loader()) - 1) * LAYERS
