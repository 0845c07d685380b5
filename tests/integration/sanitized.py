"""Some steps by plans that move everything: ``TORCH_CUDA_SANITIZER=1 python -m tests.integration.sanitized DEVICE``.

Torch's sanitizer raises an error where nothing orders two streams that use the same tensor. ``--without-waits`` leaves
out what orders them. On a CPU, where there is nothing to find, it sees all operators pass by all the same.
"""

import argparse
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.parity.cell import subject
from benchmarks.parity.plans import Group, Layout
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.host_memory import CopyStreams
from tests.integration.test_parity_offload import clipped_steps

STEPS = 4
ALL = OffloadRatios(parameters=1.0, optimizer=1.0, activations=1.0)
LAYOUTS = (
    Layout(groups=(Group(offload=ALL, checkpointed=1),), parts=2),
    Layout(groups=(Group(offload=OffloadRatios(parameters=0.3, optimizer=0.3, activations=0.3)),)),
    Layout(groups=(Group(dp=2, zero=3, offload=ALL), Group(dp=2, zero=1, offload=ALL)), parts=2),
)


def train(layout, device):
    """Clipped steps; the bytes that were copied from host memory."""
    return sum(
        nbytes for *_, nbytes in clipped_steps(subject("nano_even", torch.float32, device), layout, STEPS, device)
    )


def main():
    """Train by every plan, and say so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--without-waits", action="store_true")
    options = parser.parse_args()
    if options.device.type == "cpu":
        # The sanitizer asks for the stream of every operator.
        torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    with mock.patch.object(CopyStreams, "wait") if options.without_waits else nullcontext():
        moved = [train(layout, options.device) for layout in LAYOUTS]
    print(f"trained, moved {moved}")


if __name__ == "__main__":
    main()
