"""Whose kernels a figure is for: torch as this runtime runs it, compiled blocks, or a fused stack such as Megatron's.

A profile of the catalog is for eager torch. :func:`with_stack` makes one for another stack of it. Matrix products and
collectives are the same in all; what differs:

========== ================================== ============================================== ======================
stack      attention                          element-wise operators, copies / reductions    launches
========== ================================== ============================================== ======================
eager      what torch runs on the generation  one kernel for each                            one for each operator
compiled   the same                           chains in one kernel / a tenth to a third less half as many
fused      the same                           chains in one kernel / half                    half as many
flash2     FlashAttention-2 everywhere        as eager                                       as eager
triton     the Triton kernel of 2023          as eager                                       as eager
========== ================================== ============================================== ======================

*Chains.* Seconds of a chain in one kernel, of those of its eager operators, at large sizes (liger): gated SiLU 0.36
and 0.43 in forward and backward, rotation 0.29 and 0.29, squared ReLU 0.36 and 0.30. Blocks that are compiled get
kernels of the same kind, from the same compiler. *Reductions.* RMS norms on H200s take 0.76 and 0.90 under
torch.compile, 0.73 and 0.45 in cuDNN's kernels (norms). *Launches.* A chain has at least two operators.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_mist.errors import ProfileError
from lightning_mist.hardware.catalog.attention_kernels import (
    AMPERE,
    HOPPER_FLASH2,
    TRITON_AMPERE,
    TRITON_HOPPER,
    AttentionKernel,
    attention_rates,
)
from lightning_mist.hardware.catalog.devices import find_device
from lightning_mist.hardware.profile import HardwareProfile, KernelRate, MemoryRate

Stack = Literal["eager", "compiled", "fused", "flash2", "triton"]
"""Names of stacks; see the module."""

STACKS: tuple[Stack, ...] = get_args(Stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """Parts of what eager operators take, forward and backward."""

    chains: tuple[float, float] = (1.0, 1.0)
    reductions: tuple[float, float] = (1.0, 1.0)
    launches: float = 1.0
    attention: Mapping[int, AttentionKernel] | None = None


_CHAINS = (0.36, 0.30)

_KERNELS: Mapping[Stack, _Kernels] = {
    "eager": _Kernels(),
    "compiled": _Kernels(chains=_CHAINS, reductions=(0.76, 0.90), launches=0.5),
    "fused": _Kernels(chains=_CHAINS, reductions=(0.73, 0.45), launches=0.5),
    # By major compute capability; Ada's consumer boards run FlashAttention-2 anyway.
    "flash2": _Kernels(attention={8: AMPERE, 9: HOPPER_FLASH2}),
    "triton": _Kernels(attention={8: TRITON_AMPERE, 9: TRITON_HOPPER}),
}


def with_stack(profile: HardwareProfile, stack: str) -> HardwareProfile:
    """What a catalog machine is like under a stack.

    Raises:
        ProfileError: If the stack is not known, the profile was measured, or the stack has no attention kernel that was
            measured on the device.
    """
    kernels = _KERNELS.get(stack)  # type: ignore[call-overload]
    if kernels is None:
        raise ProfileError(f"stack = {stack!r}: whose kernels to price is one of {', '.join(STACKS)}")
    if stack == profile.stack:
        return profile
    if profile.stack != "eager" or not profile.source.startswith("catalog"):
        raise ProfileError(
            f"stack = {stack!r}: the profile of {profile.device} ({profile.source[:40]}) is of {profile.stack} "
            "kernels, and others are known of machines of the catalog only; describe the machine, or leave it out"
        )
    return replace(
        profile,
        stack=stack,
        operator_seconds=profile.operator_seconds * kernels.launches,
        rates=tuple(_faster(rate, kernels) for rate in profile.rates),
        kernels=profile.kernels if kernels.attention is None else _attention(profile, stack, kernels.attention),
    )


def _faster(rate: MemoryRate, kernels: _Kernels) -> MemoryRate:
    forward, backward = kernels.reductions if rate.kind == "reduction" else kernels.chains
    if rate.kind == "index":
        return rate
    return replace(
        rate,
        forward_bytes_per_second=tuple(value / forward for value in rate.forward_bytes_per_second),
        backward_bytes_per_second=tuple(value / backward for value in rate.backward_bytes_per_second),
    )


def _attention(profile: HardwareProfile, stack: str, known: Mapping[int, AttentionKernel]) -> tuple[KernelRate, ...]:
    device = find_device(profile.device)
    kernel = known.get(device.capability[0] if device.capability else 0)
    if kernel is None or device.efficiencies.attention is None:
        capabilities = ", ".join(f"{major}.x" for major in known)
        raise ProfileError(
            f"stack = {stack!r}: its attention was measured on devices of compute capability {capabilities}, not on "
            f"{device.name}; use eager"
        )
    peaks = dict(device.peak_flops)
    halves = tuple(dtype for dtype in peaks if dtype in ("float16", "bfloat16"))
    # Kernels of one generation in proportion to the peaks of A100 and H100.
    scale = peaks["float16"] / {8: 312e12, 9: 989e12}[device.capability[0]]  # type: ignore[index]
    return attention_rates(kernel.scaled(scale), halves, device.efficiencies.multiprocessors)
