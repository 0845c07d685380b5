"""Backwards in two: gradients of a stage's input first, those of its weights later.

Zero-bubble schedules let the stage before wait for nothing but the gradient of its output. Inside :meth:`watching` a
linear layer's product is computed with its weight *detached*, so that backward only makes the gradient of the input,
and a *tap* behind it keeps the input. When backward comes by, the tap puts the input and the gradient of the output
aside; :meth:`run` makes the weight's gradient of them, which ends in ``weight.grad`` as autograd would have it, hooks
included. Everything else (biases, norms, embeddings, convolutions, attention in one function) keeps its gradient in
the first part.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mist.attributes import replaced
from lightning_mist.errors import TraceError
from lightning_mist.runtime.parameters import detached
from lightning_mist.tensor_parallel import SplitTensor

_LINEAR = frozenset({F.linear})
_ADDMM = frozenset({torch.addmm, Tensor.addmm})
_MATMUL = frozenset({torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__})
_PRODUCTS = _LINEAR | _ADDMM | _MATMUL


@dataclass(frozen=True, slots=True)
class _Product:
    """One product whose weight's gradient waits.

    Attributes:
        value: What it was multiplied with, in the type in which it was.
        has_outputs_first: Whether the weight's first dimension is that of the outputs, as in ``F.linear``.
    """

    weight: nn.Parameter
    value: Tensor
    gradient: Tensor
    has_outputs_first: bool

    def of_weight(self) -> Tensor:
        """The gradient of the weight, in its shape and type."""
        value = self.value.reshape(-1, self.value.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        result = gradient.t() @ value if self.has_outputs_first else value.t() @ gradient
        return result.to(self.weight.dtype)


class WeightGradients:
    """The gradients of a stage's weights that wait for their time."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._waiting: dict[Hashable, list[_Product]] = {}
        self._current: list[_Product] | None = None
        self._inside = threading.local()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward, also a recomputed one: products with the stage's weights will leave their gradients out.

        Modes that look for values in the step must be entered later, so that they see what comes out of here.
        """
        if getattr(self._inside, "is_watching", False):
            yield
            return
        self._inside.is_watching = True
        try:
            with _Products(self):
                yield
        finally:
            self._inside.is_watching = False

    def collecting(self, key: Hashable) -> AbstractContextManager[None]:
        """Around a backward: what its taps put aside waits under ``key``."""
        return replaced(self, _current=self._waiting.setdefault(key, []))

    def names(self, key: Hashable) -> frozenset[str]:
        """The parameters whose gradients wait under ``key``."""
        return frozenset(self._names[id(product.weight)] for product in self._waiting.get(key, ()))

    def run(self, key: Hashable) -> None:
        """Make and accumulate all gradients that wait under ``key``: each weight's once, the last layers' first."""
        by_weight: dict[int, list[_Product]] = {}
        for product in self._waiting.pop(key, ()):
            by_weight.setdefault(id(product.weight), []).append(product)
        while by_weight:
            products = by_weight.pop(next(iter(by_weight)))
            with torch.enable_grad():
                end = _Give.apply(products[0].weight, products)  # type: ignore[no-untyped-call]
            end.backward()

    def forget(self) -> None:
        """Drop everything that waits, after a batch that broke off."""
        self._waiting.clear()

    def tap(self, product: Tensor, value: Tensor, weight: nn.Parameter, *, has_outputs_first: bool) -> Tensor:
        """The product of a value and a detached weight, as a node of the graph that puts its gradient aside."""
        # Where nothing else needs a gradient backward must still come by.
        anchor = None if product.requires_grad else torch.zeros((), device=product.device, requires_grad=True)
        kept = value.detach().to(product.dtype)

        def put_aside(value: Tensor, gradient: Tensor) -> None:
            self._put_aside(_Product(weight, value, gradient, has_outputs_first))

        # The weight itself must not enter the graph: its hooks would run in backward without a gradient.
        tapped: Tensor = _Tap.apply(product, kept, anchor, put_aside)  # type: ignore[no-untyped-call]
        return tapped

    def is_deferred(self, value: Any, weight: Any) -> bool:
        """Whether a product has a weight of the stage whose gradient can wait, and an ordinary tensor beside it."""
        return (
            isinstance(weight, nn.Parameter)
            and id(weight) in self._names
            and weight.requires_grad
            and weight.dim() == 2
            and weight.is_floating_point()
            and type(value) in (Tensor, nn.Parameter)
            and value.layout is torch.strided
        )

    def _put_aside(self, product: _Product) -> None:
        if self._current is None:
            raise TraceError(
                f"{self._names[id(product.weight)]} got a gradient outside of the schedule's backward: the step runs "
                "one of its own, which cannot be split in two; use schedule = '1f1b'"
            )
        self._current.append(product)


class _Products(TorchFunctionMode):
    """Computes products with a stage's weights so that backward leaves out the gradients of those weights."""

    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if any(isinstance(value, SplitTensor) for value in (*args, *kwargs.values())):
            # A mode is off while it answers; the products of tensor-parallel parts are to be seen here too.
            with self:
                return SplitTensor.__torch_function__(func, types, args, kwargs)
        if func in _LINEAR:
            return self._linear(*args, **kwargs)
        scales = {name: value for name, value in kwargs.items() if name in ("beta", "alpha")}
        is_plain = scales == kwargs and len(args) == (3 if func in _ADDMM else 2) and scales.get("alpha", 1) == 1
        if not is_plain or not self._gradients.is_deferred(*args[-2:]):
            return func(*args, **kwargs)
        *rest, weight = args
        product = func(*rest, detached(weight), **kwargs)
        return self._gradients.tap(product, rest[-1], weight, has_outputs_first=False)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._gradients.is_deferred(input, weight):
            return F.linear(input, weight, bias)
        assert isinstance(weight, nn.Parameter)
        product = F.linear(input, detached(weight), bias)
        return self._gradients.tap(product, input, weight, has_outputs_first=True)


class _Tap(torch.autograd.Function):
    """Hands a product on; in backward puts the gradient of its weight aside."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        value: Tensor,
        anchor: Tensor | None,
        put_aside: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(value)
        ctx.set_materialize_grads(False)
        ctx.put_aside = put_aside
        # Not a view, so that the step may write into it in place, as it may into any product.
        return product.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is not None:
            (value,) = ctx.saved_tensors
            ctx.put_aside(value, gradient)
        return gradient, None, None, None


class _Give(torch.autograd.Function):
    """A graph of one node whose backward gives a weight its gradient, so that all hooks of the weight run."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: list[_Product]) -> Tensor:
        ctx.products = products
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        total = ctx.products.pop(0).of_weight()
        while ctx.products:
            total += ctx.products.pop(0).of_weight()
        return total, None
