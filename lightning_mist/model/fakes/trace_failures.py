"""Why a step does not run on fake tensors: the operator, the module and the line, and the ways out."""

import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from lightning_mist.model.fakes.origins import is_of_network

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
