"""The state of the random generators that a step consumes, as one value that can travel."""

import hashlib

import torch
from torch import Tensor

from lightning_mist.devices import ops_of


def get_random_state(device: torch.device) -> Tensor:
    """State of the default CPU generator and of the device's own, if it has one, as ``uint8`` in host memory."""
    state, generator = torch.get_rng_state(), ops_of(device).generator()
    return state if generator is None else torch.cat([state, generator.get_state()])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Continue from a state that :func:`get_random_state` gave for the same type of device."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    generator = ops_of(device).generator()
    if generator is not None:
        generator.set_state(state[size:])


def seed_random(device: torch.device, *key: int) -> None:
    """Start the generators of a device from a hash of ``key``, equal keys giving equal numbers in any process.

    Only the generators that a step draws from are seeded: ``torch.manual_seed`` visits every backend and takes 60 to 80
    microseconds, which counts once per microbatch and stage.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(seed)
    generator = ops_of(device).generator()
    if generator is not None:
        generator.manual_seed(seed)
