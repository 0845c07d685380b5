"""Where operators come from: the module and the line of the user's code that ran them, in backward too."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_mist.attributes import MACHINERY


class Origin(NamedTuple):
    """Qualified name of a module, and file and line."""

    module: str
    line: str


NOWHERE = Origin("", "")

_FOREIGN = frozenset((*MACHINERY, "contextlib"))
"""Packages whose lines say nothing about the network."""

_RUNNER = "lightning_mist.model.trace.counted_step"
"""What runs the user's step: frames below it are not about the network."""

_NETWORKS = frozenset(("lightning_mist.model.sources.reference_decoder",))
"""Modules of such packages that are networks themselves."""


def is_of_network(module: str) -> bool:
    """Whether code of a module is the user's, or that of a library which is no part of the machinery."""
    return module in _NETWORKS or module.partition(".")[0] not in _FOREIGN


class Origins:
    """Follows which module is at work, and leads from operators of backward to those of forward.

    A node of the autograd graph gets the next sequence number just before the operator runs that it will undo, so what
    is written down with that number tells where the node's own operators come from.
    """

    def __init__(self, modules: Mapping[int, str], parameters: Mapping[int, str]) -> None:
        self._modules, self._parameters = modules, parameters
        self._stack: list[str] = []
        self._nodes: dict[int, Origin] = {}
        self._last = NOWHERE
        self._is_user: dict[str, bool] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Modules that are called inside are followed."""

        def begin(module: nn.Module, args: Any) -> None:
            self._stack.append(self._modules.get(id(module), self._stack[-1] if self._stack else ""))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """A module is at work though it is not called as a module: its forward is repeated."""
        depth = len(self._stack)
        self._stack.append(self._modules.get(id(module), ""))
        try:
            yield
        finally:
            del self._stack[depth:]

    def note_operator(self) -> None:
        """An operator is about to run."""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:
            self._last = Origin(self._stack[-1] if self._stack else "", self._line())
            # Without a node of its own an operator sees the number of the next node, whose operator comes later; with
            # several operators under one node the first is what the user called.
            self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, self._last)  # type: ignore[attr-defined]
            return
        if type(node).__name__ == "AccumulateGrad":
            name = self._parameters.get(id(node.variable), "")  # type: ignore[attr-defined]
            self._last = Origin(name.rpartition(".")[0], "")
        else:
            self._last = self._nodes.get(node._sequence_nr(), self._last)

    def here(self) -> Origin:
        """Where the operator comes from that was noted last."""
        return self._last

    def _line(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if name not in self._is_user:
                self._is_user[name] = is_of_network(name)
            if self._is_user[name]:
                return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if frame.f_back is None or name == _RUNNER:
                break
            frame = frame.f_back
        return ""
