"""Notices parameters that a step uses between its layers while their values are on another device.

Under ZeRO-3 a rank has the parameters of a layer while the layer runs. A step that begins to use one elsewhere (a
penalty on weights that starts later, a weight that is logged) would see something that is not a number.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import leaves_of, user_line

_READS = frozenset(
    ("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
)
"""Functions that use values and give no tensor."""

_FORMS = frozenset(("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like", "requires_grad_"))
"""Functions that give a tensor and use no values."""


_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


class _Watch(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        gives = name in _READS or any(isinstance(leaf, Tensor) for leaf in leaves_of(output))
        if gives and name not in _FORMS and func is not _GRADIENT:
            for leaf in leaves_of((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter) and id(leaf) in self._names and _is_away(leaf):
                    self._refuse(leaf)
        return output

    def _refuse(self, parameter: nn.Parameter) -> None:
        raise TraceError(
            f"the step uses parameter {self._names[id(parameter)]} at {user_line()} while it is on another device: "
            "under zero_stage 3 it is here for the layers that used it when the plan was made. Use zero_stage = 2, or "
            "let the step use it there from its first batch on"
        )


def _is_away(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size()


class Glue:
    """Watches a step between its layers, and not inside them, where every operator would take longer.

    Args:
        away: The parameters whose values may be elsewhere, by name.
    """

    def __init__(self, away: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in away.items()}
        self._watch: _Watch | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a step."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """The step is between layers from here on."""
        if self._watch is None and self._names:
            self._watch = _Watch(self._names)
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """The step is in a layer from here on. Modes of the user's own around it keep the watch on."""
        if self._watch is not None and torch.overrides._get_current_function_mode() is self._watch:  # type: ignore[no-untyped-call]
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
