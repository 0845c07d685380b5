"""What planning must know of a loop that the user writes: where Lightning has a trainer, there is only code."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any

from torch import nn

from lightning_mist.plan import Exclusion
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.strategy.user_code import GRADIENTS_AWAY, Code, gradients_read_in, is_known, is_library


@dataclass(kw_only=True)
class UsersLoop:
    """Stands for a trainer where there is none, as far as planning asks for one.

    Attributes:
        lightning_module: The module that is trained.
        strategy: What trains it.
        precision: Name of the precision.
    """

    lightning_module: nn.Module
    strategy: Any
    precision: str
    callbacks: list[Any] = field(default_factory=list)
    loggers: list[Any] = field(default_factory=list)
    datamodule: None = None
    gradient_clip_val: None = None
    accumulate_grad_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of a module, as a batch that can be cut and sent.

    Attributes:
        positional: Arguments by position, as a mapping: a list of as many entries as rows could be taken for rows.
        named: Arguments by name.
    """

    positional: dict[str, Any]
    named: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Call":
        """Of arguments."""
        return cls(positional={str(index): item for index, item in enumerate(args)}, named=dict(kwargs))

    def to(self, function: Callable[..., Any]) -> Any:
        """Call a function."""
        return function(*self.positional.values(), **self.named)


def loop_exclusions(frame: FrameType | None = None) -> tuple[Exclusion, ...]:
    """What the code that is running, up from a frame, and what it calls by name, rules out."""
    found = _looks_at_gradients(sys._getframe(1) if frame is None else frame)
    if found is None:
        return ()
    name, place = found
    reason = f"the loop may look at gradients ({name} in {place}), which would not all be on every rank"
    return exclusions_of([(reason, GRADIENTS_AWAY)])


def _looks_at_gradients(frame: FrameType | None) -> tuple[str, str] | None:
    waiting: list[Code] = []
    while frame is not None:
        function = FunctionType(frame.f_code.replace(co_freevars=()), frame.f_globals)
        if not is_known(frame.f_globals) and not is_library(function):
            waiting.append((frame.f_code, frame.f_globals, tuple(frame.f_locals.values()), True))
        frame = frame.f_back
    return gradients_read_in(waiting)
