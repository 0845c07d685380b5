"""Kernels that stand in for torch's own while a step is traced for another device."""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

Key = Literal["AutogradCPU", "AutocastCPU"]
"""Where in torch's dispatcher a kernel stands: where autograd begins, or where autocast casts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The device that a step is traced for.

    Attributes:
        rounds: Whether buffers are rounded up to whole tiles as kernels do. Where expressions in the length are sought,
            they are not: lengths of whole tiles, the usual ones, then come out exactly, others a little small.
    """

    torch_version: tuple[int, int]
    capability: tuple[int, int]
    rounds: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """How an operator is computed."""

    operator: str  # its name in ``aten``, with the overload if that is not the default one
    key: Key = "AutogradCPU"
    compute: Callable[..., Any]
    keeps: str  # what is different, in words
    source: str


def overload_of(name: str) -> Any:
    """The operator of a name such as ``"softmax.int"``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class KernelRegistry:
    """Keeps kernels registered with torch while any thread wants them; each thread says whether they compute for it."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        self._lock, self._users = threading.Lock(), 0
        self._library: Any = None
        self._own = threading.local()

    @contextmanager
    def in_force(self, target: Target) -> Iterator[None]:
        """Inside, fake tensors of this thread are computed as on a device."""
        before = self._target()
        self._enter()
        self._own.target = target
        try:
            yield
        finally:
            self._own.target = before
            self._leave()

    def _target(self) -> Target | None:
        return getattr(self._own, "target", None)

    def _enter(self) -> None:
        with self._lock:
            if self._users == 0:
                library: Any = torch.library.Library
                self._library = library("aten", "IMPL")
                self._register(self._library)
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._library._destroy()
                self._library = None

    def _register(self, library: Any) -> None:
        with warnings.catch_warnings():
            # torch says once that a kernel of its own is overridden, which is what is wanted here.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for kernel in self._kernels:
                library.impl(kernel.operator, self._call(kernel), kernel.key, with_keyset=True)

    def _call(self, kernel: Kernel) -> Callable[..., Any]:
        operator, compute = overload_of(kernel.operator), kernel.compute
        is_cast = kernel.key == "AutocastCPU"
        has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
        after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, kernel.key))

        def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
            target = self._target()
            if is_cast or (target is not None and any(isinstance(leaf, FakeTensor) for leaf in args)):
                result = compute(target, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if has_parts and not is_cast:
                return operator.decompose(*args, **kwargs)
            return operator.redispatch(keys & after, *args, **kwargs)

        return call
