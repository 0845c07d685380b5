"""Random numbers of parts: none is drawn twice, and what all ranks draw alike stays alike."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.tensor_parallel.group import TensorGroup

_BITS = 62
"""Bits of a drawn seed; ``manual_seed`` takes 64, and a signed integer is drawn."""

_CUDA_STEP = 4
"""Offsets of CUDA's Philox generator are multiples of four (``torch/csrc/cuda/Generator``)."""


@contextmanager
def own_random(like: Tensor, group: TensorGroup) -> Iterator[None]:
    """Inside, the default generator of a tensor's device draws numbers of this rank's own.

    The common stream advances by one number, the same on every rank, so that it stays common. Whoever restores the
    common stream (recomputation in backward) gets the same numbers here too.

    Args:
        like: A tensor on the device.
        group: The ranks.
    """
    if isinstance(like, FakeTensor):
        yield
        return
    if like.device.type == "cuda":
        generator = torch.cuda.default_generators[like.device.index or 0]
        # Drawing a number would wait for the device: its place in the stream is as good, and known to the host.
        offset = generator.get_offset()
        drawn = hash((generator.initial_seed(), offset)) % 2**_BITS
        generator.set_offset(offset + _CUDA_STEP)
    else:
        generator = torch.default_generator
        drawn = int(torch.randint(2**_BITS, ()))
    seed = drawn // group.size * group.size + group.rank
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
