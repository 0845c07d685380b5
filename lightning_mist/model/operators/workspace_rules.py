"""What operators return that torch cannot run without values, by the word of whoever uses them.

A trace sees shapes only. An operator without a kernel for fake tensors, or whose result is as large as the values of
its input say, stops it; a rule says which shapes to plan for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = Callable[..., Any]
"""Called with an operator's arguments; returns its results as new tensors (``torch.empty``), which take no memory."""

Workspace = Callable[..., int]
"""Called with an operator's arguments; returns the bytes that it needs while it runs, beside its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What is known of one operator."""

    operator: str
    result: Result
    workspace: Workspace | None


_RULES: dict[str, list[MemoryRule]] = {}  # the rules of each operator; the last one holds


class RegisteredRule:
    """A rule that holds until it is removed, or until the end of a ``with``."""

    def __init__(self, rule: MemoryRule) -> None:
        self._rule = rule

    def remove(self) -> None:
        """Let the rule hold no longer."""
        rules = _RULES.get(self._rule.operator, [])
        if self._rule in rules:
            rules.remove(self._rule)
        if not rules:
            _RULES.pop(self._rule.operator, None)

    def __enter__(self) -> "RegisteredRule":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self.remove()


def register_memory_rule(operator: str, result: Result, *, workspace: Workspace | None = None) -> RegisteredRule:
    """Say what an operator returns, so that steps that call it can be traced.

    For example for a kernel of one's own, and for a selection of which about half is expected to remain::

        register_memory_rule("mylib::attend", lambda q, k, v: torch.empty_like(q))
        register_memory_rule("aten::index.Tensor", lambda x, mask: x.new_empty(x.shape[0] // 2, *x.shape[1:]))

    Args:
        operator: Its name, as ``"package::operator"``, with the overload behind a dot if it is not the default one.
        result: Called with the operator's arguments, of which the tensors have no values; returns new tensors of the
            shapes and types of its results.
        workspace: Called in the same way; bytes that the operator needs while it runs.

    Returns:
        What removes the rule again.

    Raises:
        ValueError: If the name is not one of an operator.
    """
    package, colons, name = operator.partition("::")
    if not (package and colons and name):
        raise ValueError(f"operator {operator!r}: a rule is for an operator by its full name; write mylib::{operator}")
    rule = MemoryRule(operator=operator.removesuffix(".default"), result=result, workspace=workspace)
    _RULES.setdefault(rule.operator, []).append(rule)
    return RegisteredRule(rule)


def rule_of(operator: Any, args: Any, kwargs: Any) -> MemoryRule | None:
    """The rule for a call of an operator, if there is one and values are missing."""
    if not _RULES:
        return None
    found = _RULES.get(operator.name())
    if not found or not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
        return None
    return found[-1]


def workspace_bytes(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that an operator needs while it runs, by a rule."""
    rule = rule_of(operator, args, kwargs)
    return 0 if rule is None or rule.workspace is None else int(rule.workspace(*args, **kwargs))


class _Rules(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = rule_of(func, args, kwargs)
        if rule is None:
            return func(*args, **kwargs)
        fake = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
        with fake.fake_mode, torch.no_grad():
            return rule.result(*args, **kwargs)


@contextmanager
def memory_rules() -> Iterator[None]:
    """Inside, operators on fake tensors follow the rules that there are."""
    if not _RULES:
        yield
        return
    with _Rules():  # type: ignore[no-untyped-call]
        yield
