"""Notices parameters that a step uses between its layers while their values are on another device.

Under ZeRO-3 a rank has the parameters of a layer while the layer runs. A step that begins to use one elsewhere (a
penalty on weights that starts later, a weight that is logged) would see something that is not a number.

Before the first layer of a later stage the step does again what the stages before have done, for its form alone: what
it makes of such a parameter there is a fake, as what it makes of parameters of other stages is.

Nor may a step run a backward of its own while parameters behind it are freed.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import leaves_of, user_line
from lightning_mist.runtime.shared_patch import SharedPatch
from lightning_mist.tensors import is_hollow

_READS = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)
"""Functions that use values and give no tensor."""

_FORMS = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like", "requires_grad_"))
"""Functions that give a tensor and use no values."""


_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str], fake_mode: FakeTensorMode | None) -> None:
        super().__init__()
        self._names, self._fake_mode = names, fake_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        gives = name in _READS or any(isinstance(leaf, Tensor) for leaf in leaves_of(output))
        if gives and name not in _FORMS and func is not _GRADIENT:
            for leaf in leaves_of((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter) and id(leaf) in self._names and is_hollow(leaf):
                    return self._hidden(leaf, output, leaves_of((args, kwargs or {})))
        return output

    def _hidden(self, parameter: nn.Parameter, output: Any, given: Iterable[Any]) -> Any:
        """What a function made of a parameter's missing values, as a fake."""
        fake_mode, known = self._fake_mode, {id(leaf) for leaf in given}
        if fake_mode is None or any(not isinstance(leaf, Tensor) or id(leaf) in known for leaf in leaves_of(output)):
            self._refuse(parameter)

        def hide(tensor: Tensor) -> Tensor:
            assert fake_mode is not None
            return tensor if isinstance(tensor, FakeTensor) else fake_mode.from_tensor(tensor.detach())

        return tree_map_only(Tensor, hide, output)

    def _refuse(self, parameter: nn.Parameter) -> NoReturn:
        raise TraceError(
            f"the step uses parameter {self._names[id(parameter)]} at {user_line()} while it is on another device: "
            "under zero_stage 3 it is here for the layers that used it when the plan was made. Use zero_stage = 2, or "
            "let the step use it there from its first batch on"
        )


class ParameterGuard:
    """Watches a step between its layers, and not inside them, where every operator would take longer."""

    def __init__(self, away: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in away.items()}
        self._watch: _Watch | None = None

    @contextmanager
    def watched(self, fake_mode: FakeTensorMode | None = None) -> Iterator[None]:
        """Inside, the step is watched wherever it is between its layers."""
        self.enter(fake_mode)
        try:
            yield
        finally:
            self.leave()

    def enter(self, fake_mode: FakeTensorMode | None = None) -> None:
        """The step is between layers from here on; with ``fake_mode`` before the first of the stage."""
        if self._watch is None and self._names:
            self._watch = _Watch(self._names, fake_mode)
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The step is in a layer from here on. Modes of the user's own around it keep the watch on."""
        if self._watch is not None and torch.overrides._get_current_function_mode() is self._watch:  # type: ignore[no-untyped-call]
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]


_HERE = threading.local()


@contextmanager
def refused_backward() -> Iterator[None]:
    """Inside, this thread may not run a backward; see :class:`~lightning_mist.errors.TraceError`."""
    _HERE.is_in_step = True
    try:
        with _guarded_backward():
            yield
    finally:
        _HERE.is_in_step = False


@SharedPatch
@contextmanager
def _guarded_backward() -> Iterator[None]:
    """Inside, a thread that runs a user's step may not run a backward; ``torch.autograd`` has no hook for it."""
    module: Any = torch.autograd
    original = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiler that traces a part of the step differentiates what it has traced, on tensors without values.
        is_compiling = TracingContext.try_get() is not None
        if getattr(_HERE, "is_in_step", False) and not is_compiling:
            raise TraceError(
                "the step runs a backward of its own (torch.autograd.grad or Tensor.backward): under zero_stage 3, and "
                "where parameters are offloaded, those of the layers behind it are freed by then; use zero_stage=2 and "
                "offload.parameters=0"
            )
        return original(*args, **kwargs)

    module._engine_run_backward = run
    try:
        yield
    finally:
        module._engine_run_backward = original
