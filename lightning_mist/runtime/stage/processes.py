"""Notices when user code talks to other processes, or asks which one it runs in.

Ranks that share a batch, or cut it, run a step at other times and more or less often than each other: what the step
says to other processes would be answered by the wrong ones, or never. ``torch.distributed`` has no hook for this. All
its collectives, and its ``get_rank``, ask one function of its module whether this process is in the group; that one is
replaced while somebody watches.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as dist

from lightning_mist.attributes import replaced
from lightning_mist.plan.calls import user_line

Talk = Literal["collective", "rank"]
"""A message to other processes, or the question which one this is."""

Notice = Callable[[Talk, str], bool]
"""Is told what user code does and where; a collective does nothing if it answers True. It may raise instead."""

_OURS = "lightning_mist"
_BETWEEN = frozenset(("torch", "contextlib", "functools"))
_SPEAKING = tuple(f"lightning_mist.{name}" for name in ("strategy", "hardware", "cli", "runtime.communication"))
"""Where this package talks to other processes itself; elsewhere it only passes on what user code does."""

_LIBRARIES = frozenset(("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"))

_ASKING = ("get_", "_get_", "is_", "_is_", "_check_", "destroy_", "_abort_")
"""How names begin of functions that ask the same function and say nothing to others."""


@contextmanager
def watched_processes(notice: Notice) -> Iterator[None]:
    """Inside, user code that talks to other processes is noticed, on any thread; what this package says is not."""
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    module: Any = dist.distributed_c10d
    original = module._rank_not_in_group

    def is_outside(group: Any) -> bool:
        function = sys._getframe(1).f_code.co_name
        caller = _caller()
        # torch itself asks for the rank in every collective, to log it.
        asks = str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0]
        if function == "get_rank" and asks not in ("torch", _OURS, *_LIBRARIES):
            notice("rank", f"get_rank at {_line()}")
        if function.startswith(_ASKING) or caller == _OURS:
            return bool(original(group))
        return notice("collective", f"{function} at {_line()}") or bool(original(group))

    with replaced(module, _rank_not_in_group=is_outside, _warn_not_in_group=lambda name: None):
        yield


def _caller() -> str:
    """The package of the innermost frame that is neither torch's nor passes on what others do."""
    frame = sys._getframe(2)
    while True:
        name = str(frame.f_globals.get("__name__"))
        top = name.partition(".")[0]
        is_between = top in _BETWEEN or (top == _OURS and not name.startswith(_SPEAKING))
        if not is_between or frame.f_back is None:
            return top
        frame = frame.f_back


def _line() -> str:
    return user_line(("torch", "contextlib", "functools", _OURS, *_LIBRARIES))
