"""Random numbers on parts.

Values that all ranks hold whole draw from the common stream of the device's default generator, which is equal on all
ranks. A part draws from a stream of its own, whose seed comes from the common stream and the rank: two ranks never
repeat each other, the common stream moves on alike everywhere, and a recomputation that restores the generators gets
the same numbers again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.devices import ops_of

_MASK = (1 << 64) - 1
# CUDA's generator counts its offset in steps of 4 (ATen/cuda/CUDAGeneratorImpl.cpp).
_CUDA_STEP = 4


def mix(value: int, rank: int) -> int:
    """A seed for a rank from a common value: SplitMix64 (Steele, Lea, Flood 2014) after rank + 1 steps."""
    value = (value + (rank + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) & (_MASK >> 1)


@contextmanager
def own_stream(part: Tensor, rank: int) -> Iterator[None]:
    """Inside, the default generator of a part's device gives numbers that are this rank's alone."""
    if isinstance(part, FakeTensor) or part.is_meta:
        yield
        return
    generator = ops_of(part.device).generator()
    if generator is None:
        generator = torch.default_generator
        seed = int(torch.randint(1 << 62, (), device="cpu").item())
        after = generator.get_state()
    else:
        # Seed and place in the stream are on the host: nothing here waits for the device.
        offset = generator.get_offset()
        seed = mix(generator.initial_seed() & _MASK, 0) ^ offset
        generator.set_offset(offset + _CUDA_STEP)
        after = generator.get_state()
    generator.manual_seed(mix(seed, rank))
    try:
        yield
    finally:
        generator.set_state(after)
