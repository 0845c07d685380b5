"""What is alive when: a dispatch mode that sees every operator of a step, forward and backward.

A :class:`Ledger` knows every storage that an operator makes, the part of the step that made it, and when it is gone. It
counts nothing that existed before: parameters, the batch, gradients.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.attributes import replaced
from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import NOWHERE, Guesses, Origin, Origins, guess, storage_of, too_many
from lightning_mist.model.operator_costs import (
    computes,
    flops,
    kind_of,
    moved_bytes,
    narrow_type,
    operands_of,
    tensors_in,
)
from lightning_mist.model.spec import OperatorKind
from lightning_mist.tensor_parallel import SplitTensor, local_of
from lightning_mist.without_values import workspace_bytes

Cause = Literal["forward", "recompute", "backward", "accumulate"]
"""Why an operator ran: as part of the forward, of a forward that is repeated in backward, of backward itself, or to add
a gradient to a parameter's."""

Work = tuple[OperatorKind, int, int]
"""Kind, floating-point operations and moved bytes of one operator."""


@dataclass(slots=True, kw_only=True)
class PhaseCount:
    """What happened in one direction of one part of a step.

    Attributes:
        repeated: Those of its operators that repeated a forward.
        timeline: Bytes alive on entry and after every operator (counted operators only: views change nothing).
    """

    work: list[Work] = field(default_factory=list)
    repeated: list[Work] = field(default_factory=list)
    weight_flops: int = 0
    weight_bytes: int = 0
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    timeline: list[int] = field(default_factory=list)
    start: int = -1  # number of the first reading of the timeline among all of the step; -1 if the phase never begins
    recomputes: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(flops for _, flops, _ in self.work)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return sum(moved for _, _, moved in self.work)

    @property
    def operators(self) -> int:
        """Number of operators that computed."""
        return len(self.work)


@dataclass(frozen=True, slots=True)
class Given:
    """That a storage entered a part: as an activation in its forward, or as a gradient in its backward."""

    part: int
    is_gradient: bool  # whether it is the gradient of what the part handed on
    slot: int  # index among the tensors that crossed there


@dataclass(slots=True, kw_only=True)
class Storage:
    """A storage that an operator made.

    Attributes:
        died: Number of the first reading at which it was not any more; ``None`` if it outlived the step.
        weights: Parameters whose gradients are made of it by themselves where a zero-bubble schedule puts them off: the
            part that multiplies with the parameter, and the parameter's name within it.
    """

    bytes: int
    part: int
    cause: Cause
    born: int  # number of the first reading at which it was alive, among all of the step
    died: int | None = None
    saved: bool = False  # whether it was alive when the step's forward had ended
    shared: bool  # whether only the batch shaped it
    operator: str
    dtype: str
    origin: Origin
    parameter: str = ""  # name of the parameter that it was a gradient of
    is_gradient: bool = False  # whether it was a parameter's gradient in the end
    given: list[Given] = field(default_factory=list)
    weights: list[tuple[int, str]] = field(default_factory=list)


_DEVICE_OF = torch.ops.prim.device.default
_CAST = torch.ops.aten._to_copy.default


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and live storages, phase by phase, and how often a fake number had to be guessed.

    Parts are numbered in execution order: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. The caller says
    when a part begins (:meth:`enter`); what happens until then belongs to the part before.
    """

    def __init__(self, num_parts: int, origins: Origins | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = [PhaseCount() for _ in range(num_parts)]
        self.backward = [PhaseCount() for _ in range(num_parts)]
        self.storages: list[Storage] = []
        self.live_bytes = 0
        self.guesses = Guesses()
        self.head_width = 0
        self.narrow: dict[str, str] = {}  # what multiplies in 8 bits: operator and type, and the first module that does
        self.part = 0
        self._origins = origins
        self._live: dict[int, Storage] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._operand: tuple[torch.Tensor, int, str] | None = None
        self._readings = 0
        self.is_backward = self._recomputes = False
        self._phase = self.forward[0]
        self._begin()

    def _begin(self) -> None:
        if self._phase.start < 0:
            self._phase.start = self._readings
        self._read()

    def _read(self) -> None:
        self._phase.timeline.append(self.live_bytes)
        self._readings += 1

    def enter(self, part: int, backward: bool = False) -> None:
        """Begin the forward or the backward of a part."""
        self.part, self.is_backward = part, backward
        self._phase = (self.backward if backward else self.forward)[part]
        self._begin()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Inside, operators repeat a forward."""
        self._phase.recomputes = True
        with replaced(self, _recomputes=True):
            yield

    def note_linear(self, *, flops: int, kept_bytes: int) -> None:
        """A linear operation on a parameter ran in the part at hand."""
        self._phase.weight_flops += flops
        self._phase.weight_bytes += kept_bytes

    def note_collective(self, operation: str, size: int) -> None:
        """Tensor-parallel ranks exchanged a tensor of ``size`` bytes in the part at hand."""
        calls, known = self._phase.collectives.get(operation, (0, 0))
        self._phase.collectives[operation] = (calls + 1, known + size)

    def find(self, tensor: torch.Tensor) -> Storage | None:
        """What is known of a tensor's storage, if an operator of the step made it."""
        return self._live.get(storage_of(tensor))

    def note_given(self, tensor: torch.Tensor, part: int, is_gradient: bool, slot: int) -> None:
        """A tensor entered a part."""
        found = self.find(tensor)
        if found is not None:
            found.given.append(Given(part, is_gradient, slot))

    def note_weight(self, tensor: torch.Tensor, part: int, name: str) -> None:
        """The gradient of a parameter is made of a tensor."""
        found = self.find(tensor)
        if found is not None and (part, name) not in found.weights:
            found.weights.append((part, name))

    @contextmanager
    def multiplying(self, tensor: torch.Tensor, part: int, name: str) -> Iterator[None]:
        """Inside runs the product whose parameter's gradient is made of a tensor, or of what autocast casts it to."""
        # Before the product: recomputation ends in the last one, as soon as it has what it was for.
        self.note_weight(tensor, part, name)
        with replaced(self, _operand=(tensor, part, name)):
            yield

    def _note_cast(self, source: torch.Tensor, cast: torch.Tensor) -> None:
        """The operand of the product that runs may be cast: then not it is kept for the gradient, but its copy."""
        operand = self._operand
        if operand is not None and storage_of(source) == storage_of(operand[0]):
            self._operand, found = None, self.find(source)
            if found is not None:
                found.weights.remove(operand[1:])
            self.note_weight(cast, *operand[1:])

    def end_forward(self) -> None:
        """The step's forward has ended: what is alive now was saved."""
        for storage in self._live.values():
            storage.saved = True

    def end(self) -> None:
        """The step has ended: what is alive now outlives it."""
        self._live.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            # As the tensor itself would answer, which torch asks twice per operator.
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            endless = self.guesses.note(self._readings, self.part)
            if endless:
                raise TraceError(endless)
            return guess(args[0].dtype)
        if endless := too_many(self._readings):
            raise TraceError(endless)
        if self._origins is not None:
            self._origins.note_operator()
        result = func(*args, **kwargs)
        if func.namespace == "prim" or func.is_view:
            return result
        outputs = list(tensors_in(result))
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if not computes(func, inputs, outputs):
            return result
        moved = moved_bytes(func, args, kwargs, inputs, outputs)
        kind = kind_of(func, args, kwargs)
        if kind in ("attention", "causal_attention") and not self.is_backward:
            self.head_width = max(self.head_width, int(args[0].shape[-1]))
        work = kind, flops(func, args, kwargs, result), moved
        if (work[1] or func.namespace != "aten") and (narrow := narrow_type(inputs, floating=True)):
            self.narrow.setdefault(f"{func._overloadpacket} in {narrow}", self._here().module)
        self._phase.work.append(work)
        if self._recomputes:
            self._phase.repeated.append(work)
        self._take_in(func, inputs, outputs)
        if func is _CAST:
            self._note_cast(args[0], result)
        self._use(func, workspace_bytes(func, args, kwargs))
        self._read()
        return result

    def _use(self, func: Any, workspace: int) -> None:
        if not workspace:
            return
        self.live_bytes += workspace
        made = self._storage(workspace, f"{func} (workspace)", "uint8", shared=False)
        self.storages.append(made)
        self._read()
        made.died = self._readings
        self.live_bytes -= workspace

    def _take_in(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        existing: set[int] | None = None
        for tensor in outputs:
            if tensor.is_meta:
                continue  # it has a shape and no memory, also where it is a fake
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live:
                self._resize(func, tensor, key)
                continue
            if existing is None:
                existing = {storage_of(item) for item in inputs}
            if key not in existing:
                self._add(func, tensor, key)
                self._watch[key] = weakref.ref(storage, self._dropper(key))

    def _add(self, func: Any, tensor: torch.Tensor, key: int) -> None:
        size, dtype = tensor.untyped_storage().nbytes(), str(tensor.dtype).removeprefix("torch.")
        self._live[key] = made = self._storage(size, str(func), dtype, shared=not isinstance(tensor, FakeTensor))
        self.storages.append(made)
        self.live_bytes += made.bytes

    def _storage(self, size: int, operator: str, dtype: str, *, shared: bool) -> Storage:
        return Storage(
            bytes=size,
            part=self.part,
            cause=self._cause(),
            born=self._readings,
            shared=shared,
            operator=operator,
            dtype=dtype,
            origin=self._here(),
        )

    def _here(self) -> Origin:
        return NOWHERE if self._origins is None else self._origins.here()

    def _cause(self) -> Cause:
        if not self.is_backward:
            return "forward"
        if self._recomputes:
            return "recompute"
        node = torch._C._current_autograd_node()
        return "accumulate" if type(node).__name__ == "AccumulateGrad" else "backward"

    def _resize(self, func: Any, tensor: torch.Tensor, key: int) -> None:
        """A storage that has got another size is another one from now on."""
        old = self._live[key]
        if old.bytes == tensor.untyped_storage().nbytes():
            return
        old.died = self._readings
        self.live_bytes -= old.bytes
        self._add(func, tensor, key)
        made = self._live[key]
        made.shared, made.given, made.weights = old.shared, old.given, old.weights

    def _dropper(self, key: int) -> Callable[[object], None]:
        def drop(_: object) -> None:
            self._watch.pop(key, None)
            gone = self._live.pop(key, None)
            if gone is not None:
                gone.died = self._readings
                self.live_bytes -= gone.bytes

        return drop


# Which linear operations a step runs on parameters: what a zero-bubble schedule may split and put off.


class ParameterProducts(TorchFunctionMode):
    """Counts products with trained parameters, in the part of the step that runs them, and notes what these keep.

    Gradients of weights are made of inputs of the products and gradients of their outputs. A zero-bubble schedule keeps
    both until it makes the gradients: of what autocast casts the copy. Which products it takes apart is the runtime's
    rule: those of an ordinary tensor with a parameter that is a matrix, of tensor-parallel ranks those of their parts.

    Args:
        names: What parameters are called, by ``id``; without names nothing is noted.
        blocks: What the parts between the first and the last are called, within which their parameters' names count.
    """

    def __init__(
        self,
        ledger: Ledger,
        parameters: Iterable[torch.nn.Parameter],
        names: Mapping[int, str] = MappingProxyType({}),
        blocks: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._ledger, self._names, self._blocks = ledger, names, blocks
        self._trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self._kept: dict[tuple[int, int], weakref.ref[Any]] = {}
        self._is_inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value, weight, _, output_dim = operands_of(func, args, kwargs) or (None, None, None, 0)
        if not isinstance(value, torch.Tensor) or not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            return func(*args, **kwargs)
        if not (self._names and torch.is_grad_enabled()):
            result = func(*args, **kwargs)
        elif any(isinstance(item, SplitTensor) for item in (*args, *kwargs.values())):
            # A mode is off while it answers; the products of tensor-parallel parts are to be seen here too.
            with self, replaced(self, _is_inside=True):
                result = SplitTensor.__torch_function__(func, types, args, kwargs)
        else:
            result = self._noted(value, id(weight), lambda: func(*args, **kwargs))
        is_seen = self._is_inside or self._ledger.is_backward
        if not is_seen and id(local_of(weight)) in self._trained and isinstance(result, torch.Tensor):
            self._count(value, weight, 1 - output_dim, result.dtype)
        return result

    def _noted(self, value: torch.Tensor, weight: int, product: Callable[[], Any]) -> Any:
        name = self._names.get(weight) if weight in self._trained else None
        if name is None:
            return product()
        part = self._ledger.part
        within = name.removeprefix(f"{self._blocks[part - 1]}.") if 0 < part <= len(self._blocks) else name
        with self._ledger.multiplying(value, part, within):
            result = product()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(partial(self._arrived, part, within))  # type: ignore[no-untyped-call]
        return result

    def _arrived(self, part: int, name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._ledger.note_weight(gradient, part, name)

    def _count(self, value: torch.Tensor, weight: torch.Tensor, input_dim: int, dtype: torch.dtype) -> None:
        """Of a split weight what this rank computes with its part, in the type of the result."""
        sizes = local_of(weight).shape
        vectors = value.numel() // max(1, value.shape[-1])
        itemsize = dtype.itemsize
        kept = vectors * sizes[1 - input_dim] * itemsize  # the gradient of the output
        # Else another linear operation keeps this input already; of what autocast casts each keeps a copy of its own.
        if value.dtype != dtype or self._is_new(local_of(value)):
            kept += vectors * sizes[input_dim] * itemsize
        self._ledger.note_linear(flops=2 * prod(sizes) * vectors, kept_bytes=kept)

    def _is_new(self, value: torch.Tensor) -> bool:
        storage = value.untyped_storage()
        key = (self._ledger.part, storage._cdata)
        if key in self._kept:
            return False
        # What is gone may leave its address to another.
        self._kept[key] = weakref.ref(storage, lambda _: self._kept.pop(key, None))
        return True
