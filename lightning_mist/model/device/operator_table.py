"""Operators as another device runs them, for traces on fake tensors of the host.

A trace runs on the CPU, whatever the module will train on, and torch picks other operators there: it keeps the upcast
input of an RMS norm, dropout masks in the type of the activation, whole attention scores wherever dropout is asked for,
and casts other things under autocast. A :class:`DeviceOperators` table names what differs, each with its source, and
:meth:`DeviceOperators.installed` lets fake tensors go the way of the target device.

The replacements are kernels registered with torch's dispatcher, below every Python name that a function has
(``torch.x``, ``torch.nn.functional.x``, ``torch._C._nn.x``, a name imported long before) and in force while a
checkpointed block is recomputed, where function modes are not. They act on fake tensors of the thread that installed
them; everything else computes as always.

Equal on both devices, so not in the table: linear layers, embeddings, GELU, SiLU, cross entropy, group and batch norms
(but for vectors of one number per channel). Not known: what cuDNN's recurrent layers and workspaces need.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from lightning_mist.model.device import autocast as device_autocast
from lightning_mist.model.device.kernels import ATTENTION_KERNELS, NORM_KERNELS, Kernel, KernelRegistry, Target

KINDS = ("cpu", "cuda")
"""Kinds of device that there is a table for."""

TABLE_VERSION = 1
"""Grows with every change of what a table says."""

_UNKNOWN_CAPABILITY = (8, 0)
"""Compute capability where none is given: that of the A100, from which on all of torch's attentions run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperators:
    """How operators differ on one kind of device."""

    name: str
    version: int
    target: Target
    kernels: tuple[Kernel, ...]  # what is replaced, each with what it keeps for backward and where that is written

    @contextmanager
    def installed(self, *, rounds: bool = True) -> Iterator[None]:
        """Inside, fake CPU tensors of this thread are computed with these operators.

        ``torch.autocast`` follows: a step may ask for the target device's autocast by name, which torch ignores where
        that device is not at hand.
        """
        if not self.kernels:
            yield
            return
        with _cuda().in_force(replace(self.target, rounds=rounds)), device_autocast.named(self.name):
            yield


def device_operators(
    kind: str, torch_version: str | None = None, *, capability: tuple[int, int] | None = None
) -> DeviceOperators:
    """The table for a kind of device.

    Args:
        kind: ``"cpu"`` (nothing differs) or ``"cuda"``.
        torch_version: The torch that will train there; the installed one by default. Decides which kernels are fused;
            what autocast casts is always the installed one's.
        capability: CUDA compute capability; 8.0 where it is not known. Decides which attention can run.

    Raises:
        ValueError: If there is no table for the kind.
    """
    if kind not in KINDS:
        raise ValueError(f"device_kind = {kind!r}: operators are known for {' and '.join(KINDS)}; use one of them")
    version = (torch_version or torch.__version__).partition("+")[0]
    major, minor = (int(part) for part in version.split(".")[:2])
    target = Target(torch_version=(major, minor), capability=capability or _UNKNOWN_CAPABILITY)
    kernels = _kernels() if kind == "cuda" else ()
    return DeviceOperators(name=kind, version=TABLE_VERSION, target=target, kernels=kernels)


@cache
def _kernels() -> tuple[Kernel, ...]:
    return (*ATTENTION_KERNELS, *NORM_KERNELS, *device_autocast.kernels())


@cache
def _cuda() -> KernelRegistry:
    return KernelRegistry(_kernels())
