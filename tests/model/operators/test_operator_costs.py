from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.model.operators.operator_costs import computes, flops, moved_bytes, tensors_in


class Calls(TorchDispatchMode):
    """Keeps every operator with its arguments and result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.append((func, args, kwargs or {}, result))
        return result


def calls_of(function: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    with torch.no_grad(), Calls() as calls:
        function()
    return calls.seen


def cost(call: tuple[Any, tuple[Any, ...], dict[str, Any], Any]) -> tuple[bool, int, int]:
    func, args, kwargs, result = call
    inputs, outputs = list(tensors_in((args, tuple(kwargs.values())))), list(tensors_in(result))
    return (
        computes(func, inputs, outputs),
        flops(func, args, kwargs, result),
        moved_bytes(func, args, kwargs, inputs, outputs),
    )


A, B = torch.randn(3, 4), torch.randn(4, 5)
TABLE, INDICES = torch.randn(100, 8), torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: A @ B, (True, 2 * 3 * 4 * 5, 4 * (12 + 20 + 15))),
        (lambda: A + A, (True, 0, 4 * (12 + 12))),  # one tensor, read once
        (lambda: A.clone().add_(1), (True, 0, 4 * (12 + 12))),  # read and written
        (lambda: torch.empty(7), (True, 0, 0)),
        (lambda: torch.nn.functional.embedding(INDICES, TABLE), (True, 0, 8 * 3 + 2 * 4 * 24)),  # three rows of 100
    ],
    ids=["product", "sum", "in place", "factory", "lookup"],
)
def test_flops_and_bytes_of_operators(function: Any, expected: tuple[bool, int, int]) -> None:
    assert [cost(call) for call in calls_of(function) if cost(call)[0]][-1] == expected


@pytest.mark.parametrize("function", [A.t, lambda: A.view(12), lambda: torch.ops.aten._unsafe_view(A, [12])])
def test_views_do_not_compute(function: Any) -> None:
    assert not cost(calls_of(function)[-1])[0]


def test_foreach_operators_write_what_their_schema_says() -> None:
    xs = [torch.ones(10), torch.ones(5)]
    call = calls_of(lambda: torch._foreach_mul_(xs, 2.0))[-1]
    assert cost(call) == (True, 0, 4 * 15 * 2)


def test_attention_on_a_cpu_counts_like_its_two_and_five_products() -> None:
    b, h, s, d = 2, 3, 8, 4
    q, k, v = (torch.randn(b, h, s, d, requires_grad=True) for _ in range(3))
    with Calls() as calls:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
    counted = {str(call[0]): cost(call)[1] for call in calls.seen if "flash" in str(call[0])}
    product = 2 * b * h * s * s * d
    assert sorted(counted.values()) == [2 * product, 5 * product]
