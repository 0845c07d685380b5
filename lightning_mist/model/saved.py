"""What is alive when: a dispatch mode that sees every operator of a step, forward and backward.

A :class:`Ledger` knows every storage that an operator makes, the part of the step that made it, and when it is gone. It
counts nothing that existed before: parameters, the batch, gradients.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.model.operators import computes, flops, moved_bytes, storage_key, tensors_in


@dataclass(slots=True, kw_only=True)
class PhaseCount:
    """What happened in one direction of one part of a step.

    Attributes:
        flops: Floating-point operations.
        moved_bytes: Bytes read and written.
        operators: Operators that computed.
        weight_flops: Floating-point operations of linear operations on parameters.
        weight_bytes: Bytes of their inputs and outputs.
        collectives: Calls and bytes of whole tensors by collective operation.
        timeline: Bytes alive on entry and after every operator (counted operators only: views change nothing).
    """

    flops: int = 0
    moved_bytes: int = 0
    operators: int = 0
    weight_flops: int = 0
    weight_bytes: int = 0
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    timeline: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A storage at one moment: its bytes, the part of the step that made it, and whether only the batch shaped it."""

    bytes: int
    part: int
    shared: bool


def _guess(dtype: torch.dtype) -> bool | int | float:
    """What a fake number is taken to be where Python reads it: costs rarely depend on it, logging never."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and live storages, phase by phase, and how often a fake number had to be guessed.

    Parts are numbered in execution order: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. The caller says
    when a part begins (:meth:`enter`); what happens until then belongs to the part before.
    """

    def __init__(self, num_parts: int) -> None:
        """Start in the forward of part 0."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = [PhaseCount() for _ in range(num_parts)]
        self.backward = [PhaseCount() for _ in range(num_parts)]
        self._live: dict[int, Holding] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self.live_bytes = 0
        self.guesses = 0
        self.part = 0
        self._phase = self.forward[0]
        self._phase.timeline.append(0)

    def enter(self, part: int, *, backward: bool = False) -> None:
        """Begin the forward or the backward of a part."""
        self.part = part
        self._phase = (self.backward if backward else self.forward)[part]
        self._phase.timeline.append(self.live_bytes)

    def note_linear(self, *, flops: int, kept_bytes: int) -> None:
        """A linear operation on a parameter ran in the part at hand."""
        self._phase.weight_flops += flops
        self._phase.weight_bytes += kept_bytes

    def note_collective(self, operation: str, size: int) -> None:
        """Tensor-parallel ranks exchanged a tensor of ``size`` bytes in the part at hand."""
        calls, known = self._phase.collectives.get(operation, (0, 0))
        self._phase.collectives[operation] = (calls + 1, known + size)

    def holdings(self) -> dict[int, Holding]:
        """The storages that are alive now, by identity."""
        return dict(self._live)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and write down what it did."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self.guesses += 1
            return _guess(args[0].dtype)
        result = func(*args, **kwargs)
        if func.namespace == "prim" or func.is_view:
            return result
        outputs = list(tensors_in(result))
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if not computes(func, inputs, outputs):
            return result
        phase = self._phase
        phase.operators += 1
        phase.flops += flops(func, args, kwargs, result)
        phase.moved_bytes += moved_bytes(func, args, kwargs, inputs, outputs)
        self._take_in(inputs, outputs)
        phase.timeline.append(self.live_bytes)
        return result

    def _take_in(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        existing: set[int] | None = None
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                self._resize(key, storage.nbytes())
                continue
            if existing is None:
                existing = {storage_key(item) for item in inputs}
            if key not in existing:
                self._live[key] = Holding(
                    bytes=storage.nbytes(), part=self.part, shared=not isinstance(tensor, FakeTensor)
                )
                self.live_bytes += storage.nbytes()
                self._watch[key] = weakref.ref(storage, self._dropper(key))

    def _resize(self, key: int, size: int) -> None:
        holding = self._live[key]
        if holding.bytes != size:
            self.live_bytes += size - holding.bytes
            self._live[key] = Holding(bytes=size, part=holding.part, shared=holding.shared)

    def _dropper(self, key: int) -> Callable[[object], None]:
        def drop(_: object) -> None:
            self._watch.pop(key, None)
            self.live_bytes -= self._live.pop(key).bytes

        return drop
