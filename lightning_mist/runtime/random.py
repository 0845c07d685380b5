"""The state of the random generators that a step consumes, as one value that can travel."""

import hashlib

import torch
from torch import Tensor


def get_random_state(device: torch.device) -> Tensor:
    """State of the default CPU generator and, on a CUDA device, of that device's generator, as bytes.

    Returns:
        A ``uint8`` tensor in host memory.
    """
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat([state, torch.cuda.get_rng_state(device)])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Continue from a state that :func:`get_random_state` gave for the same type of device."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)


def seed_random(device: torch.device, *key: int) -> None:
    """Start the generators of a device from a hash of ``key``, equal keys giving equal numbers in any process.

    Only the generators that a step draws from are seeded: ``torch.manual_seed`` visits every backend and takes 60 to 80
    microseconds, which counts once per microbatch and stage.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    seed = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
