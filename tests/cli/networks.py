"""Networks that commands are tried on, and how they are called."""

import pytest
import torch
from torch import nn

from lightning_mist import cli


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def make_net():
    return Net(), torch.ones(4, 8)


class Wide(nn.Module):
    """Layers that devices can share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)
        )

    training_step = Net.training_step


def make_wide():
    return Wide(), torch.ones(4, 8)


class Own(Net):
    """Makes its optimizer itself."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def make_own():
    return Own(), torch.ones(4, 8)


def make_nothing():
    return {}["nothing"]


def run(*arguments):
    cli.main([str(argument) for argument in arguments])


def refused(capsys, *arguments):
    """The error that a command prints instead of a traceback."""
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert error.value.code == 2
    return capsys.readouterr().err
