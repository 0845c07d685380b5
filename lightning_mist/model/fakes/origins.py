"""Where a run without values is: which module and line ran an operator or read a value, and why it cannot go on."""

import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_mist.attributes import MACHINERY
from lightning_mist.model.child_process import BUDGET
from lightning_mist.plan.calls import user_line

# Where operators come from: the module and the line of the user's code that ran them, in backward too.


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


@cache
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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Modules that are called inside are followed."""

        def begin(module: nn.Module, args: Any) -> None:
            self._stack.append(self._modules.get(id(module), self._stack[-1] if self._stack else ""))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._stack.pop()

        with register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True):
            yield

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
            if is_of_network(name):
                return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if frame.f_back is None or name == _RUNNER:
                break
            frame = frame.f_back
        return ""


# Reads of a tensor's values into Python, and what a run without values answers them.


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A value of a tensor that was read into Python."""

    function: str  # the torch function, for example ``".item()"``
    line: str
    region: int  # position of the block entered last
    is_inner: bool
    source: str  # what the value depends on: ``"parameters"`` or ``"random numbers"``
    value: Any


class Guesses:
    """Counts the numbers that had to be guessed, by the line that read them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], tuple[int, int, int]] = {}
        """By line and block: reads, rounds of operators and reads, operators that had run at the last read."""

    @property
    def reads(self) -> tuple[tuple[str, int], ...]:
        """How often each line read a number, in the order of the first reads."""
        found: dict[str, int] = {}
        for (line, _), (reads, _, _) in self._counts.items():
            found[line] = found.get(line, 0) + reads
        return tuple(found.items())

    def note(self, operators: int, block: int = 0) -> str:
        """Count a read by the user's line that is running; why the line can only be a loop, if so, else nothing."""
        line = user_line()
        reads, rounds, before = self._counts.get((line, block), (0, 0, -1))
        reads, rounds = reads + 1, rounds + (before != operators)
        self._counts[line, block] = reads, rounds, operators
        most = BUDGET.rounds if operators > BUDGET.operators else BUDGET.most_rounds
        if reads <= BUDGET.most_reads and rounds <= most:
            return ""
        return (
            f"the step has read values into Python {reads} times at {line}: a loop that ends by a value has no fixed "
            "cost, and no end without values; let it end after a number of rounds"
        )


def too_many(operators: int) -> str:
    """Why a run without values that has come so far has no end, if so, else nothing."""
    if operators <= BUDGET.most_operators:
        return ""
    return f"the step has run {operators} operators without an end; the last is at {user_line()}"


def guess(dtype: torch.dtype) -> bool | int | float:
    """What a fake number is taken to be: costs rarely depend on it, logging never."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def describe_guesses(reads: tuple[tuple[str, int], ...]) -> str:
    """What was read where, in words for the user."""
    lines = ", ".join(line for line, _ in reads[:3]) + (f" and {len(reads) - 3} other lines" if len(reads) > 3 else "")
    total = sum(count for _, count in reads)
    return f"the step reads {total} values into Python at {lines}; branches on them were taken as for False or 1"


# Why a step does not run on fake tensors: the operator, the module and the line, and the ways out.

Need = Literal["kernel", "size", "values", "memory"]
"""What is missing: a kernel, the size of a result, values that decide, or memory to read."""

_NEEDS: dict[Need, str] = {
    "kernel": "has no kernel for fake tensors",
    "size": "gives a result whose size depends on values",
    "values": "depends on values",
    "memory": "reads the memory of a tensor",
}

_MESSAGES: tuple[tuple[re.Pattern[str], Need], ...] = (
    (re.compile(r"no fake impl registered for <CustomOpDef\((?P<name>[\w:.]+)\)>"), "kernel"),
    (re.compile(r"Could not run '(?P<name>[\w:.]+)' with arguments from the 'Meta' backend"), "kernel"),
    (re.compile(r"(?P<name>[\w:.]+): attempted to run this operator with Meta tensors"), "kernel"),
    (re.compile(r"(?P<name>\.numpy\(\)) is not supported for tensor subclasses"), "memory"),
    (re.compile(r"Cannot access (data pointer|storage) of Tensor (?P<name>)"), "memory"),
)
"""How torch says it where it has no class for it."""

_CLASSES: dict[type[Any], Need] = {
    DynamicOutputShapeException: "size",
    DataDependentOutputException: "values",
    UnsupportedOperatorException: "kernel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What stopped a step on fake tensors."""

    operator: str  # name of the operator, as ``"package::operator"``; empty if it is not known
    module: str  # qualified name of the module that ran it; empty for the step itself
    line: str  # file and line that called it; empty in backward
    need: Need

    def __str__(self) -> str:
        """In words, without a full stop."""
        name = self.operator or "the step"
        where = f" in module {self.module!r}" if self.module else ""
        line = f" at {self.line}" if self.line else " in backward"
        return f"{name}{where}{line} {_NEEDS[self.need]}"

    @property
    def ways_out(self) -> str:
        """What can be done about it, in words."""
        if self.need in ("kernel", "size") and "::" in self.operator:
            rule = f"say what it returns with lightning_mist.register_memory_rule({self.operator!r}, ...)"
            if self.need == "kernel" and not self.operator.startswith("aten::"):
                return f"give it a fake kernel with torch.library.register_fake({self.operator!r}), or {rule}"
            return f"{rule}, or write that line without it"
        return (
            "put that line into an operator of its own (torch.library.custom_op) with a fake kernel (register_fake), "
            "or write it without reading values"
        )


def find_obstacle(error: BaseException, module: nn.Module) -> Obstacle | None:
    """The obstacle that an error is about; ``None`` if it is not about fake tensors."""
    found = next(filter(None, map(_missing, _causes(error))), None)
    if found is None:
        return None
    name, need = found
    frames, line = _frames_of(error)
    operator = name if need == "memory" else _operator_in(frames) or name
    return Obstacle(operator=operator, module=_module_in(frames, module), line=line, need=need)


def refusal(error: BaseException, module: nn.Module, earlier: Sequence[str], *, is_fake: bool) -> str:
    """Why a step cannot be traced, in words, without a full stop; ``earlier`` is why not on fake tensors."""
    obstacle = find_obstacle(error, module) if is_fake else None
    if obstacle is not None:
        ways = obstacle.ways_out
        return f"the step does not run on fake tensors: {obstacle}. {ways[0].upper()}{ways[1:]}"
    text = f"the step cannot be traced: {type(error).__name__}: {error}{_place_of(error, module)}"
    return "; ".join((text, *(item for item in earlier if text not in item)))


def _place_of(error: BaseException, module: nn.Module) -> str:
    """Module and line of an error that a step raised, in words; empty if it was not in the step."""
    frames, line = _frames_of(error)
    if not line:
        return ""
    name = _module_in(frames, module)
    return f" (in module {name!r} at {line})" if name else f" (at {line})"


def _frames_of(error: BaseException) -> tuple[list[FrameType], str]:
    walked = list(traceback.walk_tb(error.__traceback__))
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in walked
        if is_of_network(str(frame.f_globals.get("__name__")))
    ]
    return [frame for frame, _ in walked], lines[-1] if lines else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _missing(error: BaseException) -> tuple[str, Need] | None:
    for cls, need in _CLASSES.items():
        if isinstance(error, cls):
            return _name_of(error.func), need
    for pattern, need in _MESSAGES:
        found = pattern.search(str(error))
        if found is not None:
            return found["name"], need
    return None


def _name_of(operator: Any) -> str:
    return str(operator.name())


def _operator_in(frames: list[FrameType]) -> str:
    """The operator that the step ran: torch may have come upon another one inside of it."""
    for frame in reversed(frames):
        func = frame.f_locals.get("func")
        is_ours = str(frame.f_globals.get("__name__")).startswith("lightning_mist.")
        if is_ours and isinstance(func, torch._ops.OpOverload):
            return _name_of(func)
    return ""


def _module_in(frames: list[FrameType], module: nn.Module) -> str:
    names = {id(item): name for name, item in module.named_modules()}
    own = (names.get(id(frame.f_locals.get("self"))) for frame in reversed(frames))
    return next((name for name in own if name), "")
