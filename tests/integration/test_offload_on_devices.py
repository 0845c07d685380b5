"""What is kept in host memory changes no bit on the device that trains; on a card its sanitizer finds no race."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.parity.cell import subject
from benchmarks.record import ROOT
from lightning_mist.plan import OffloadRatios
from tests.devices.kinds import CARD, DEVICES
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.integration.test_parity_offload import PLANS, clipped_steps
from tests.tiers import tiered

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("ended_streams"),
]

STEPS = 6


def train(label, device, *, moves):
    """Losses and values of clipped steps, and the bytes that came from host memory, of every rank."""
    model, layout = subject("nano_even", torch.float64, device), PLANS[label]
    if not moves:
        layout = replace(layout, groups=tuple(replace(group, offload=OffloadRatios()) for group in layout.groups))

    return clipped_steps(model, layout, STEPS, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("label", tiered(PLANS, ["one device", "parameters, tensor parallel"]))
def test_no_bit_changes(label, device):
    moved, wanted = (train(label, device, moves=moves) for moves in (True, False))
    for (losses, values, nbytes), (expected, others, nothing) in zip(moved, wanted, strict=True):
        assert nbytes > nothing == 0
        assert all(map(torch.equal, losses, expected))
        assert values.keys() == others.keys()
        assert all(torch.equal(value, others[name]) for name, value in values.items())


def sanitized(device, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.sanitized", str(device), *arguments],
        cwd=ROOT,
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_the_sanitizer_reports_nothing(device):
    done = sanitized(device)
    assert done.returncode == 0, done.stderr
    assert "CSAN detected" not in done.stderr
    assert re.search(r"trained, moved \[[1-9]\d*, [1-9]\d*, [1-9]\d*\]", done.stdout)


@pytest.mark.gpu
@pytest.mark.thorough
def test_the_sanitizer_reports_a_race_where_nothing_waits():
    done = sanitized(CARD, "--without-waits")
    assert done.returncode != 0
    assert "CSAN detected a possible data race" in done.stderr
