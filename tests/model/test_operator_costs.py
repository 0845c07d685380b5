from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mist.model.device.kernels import fused_operators
from lightning_mist.model.operator_costs import (
    LinearCall,
    LinearMode,
    computes,
    flops,
    kind_of,
    moved_bytes,
    read_linear,
    tensors_in,
)

X = torch.randn(2, 3, 8, 8)
ROWS = torch.randn(4, 8)
MATRIX, FILTERS = torch.ones(8, 5), torch.ones(4, 3, 3, 3)
NUMBERS = torch.tensor([0, 2, 1, 3])


def kinds(function: Any, *, backward: bool = False) -> list[str]:
    """Kinds of everything that a function computes, with the gradient of its sum."""
    with Calls() as calls:
        result = function()
        if backward:
            result.backward(torch.ones_like(result))
    found = []
    for operator, args, kwargs, value in calls.seen:
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        if computes(operator, inputs, list(tensors_in(value))):
            found.append(kind_of(operator, args, kwargs))
    return found


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: ROWS @ ROWS.t(), ["matmul"]),
        (lambda: torch.addmm(ROWS[0, :5], ROWS, MATRIX), ["matmul"]),
        (lambda: X @ X, ["matmul"]),
        (lambda: F.conv2d(X, FILTERS), ["convolution"]),
        (lambda: F.gelu(ROWS) + ROWS, ["elementwise", "elementwise"]),
        (lambda: torch.empty(8).log_normal_(), ["elementwise", "elementwise"]),
        (lambda: ROWS.maximum(ROWS).masked_fill(ROWS > 0, 0.0), ["elementwise"] * 3),
        (lambda: F.layer_norm(ROWS, (8,)), ["reduction"]),
        (lambda: F.group_norm(X, 3), ["reduction"]),
        (lambda: ROWS.softmax(-1).sum(), ["reduction", "reduction"]),
        (lambda: F.cross_entropy(ROWS, NUMBERS), ["reduction", "reduction"]),
        (lambda: F.max_pool2d(X, 2), ["reduction"]),
        (lambda: ROWS.max(dim=1).values, ["reduction"]),
        (lambda: F.embedding(NUMBERS, ROWS), ["index"]),
        (lambda: ROWS[NUMBERS], ["index"]),
        (lambda: ROWS.gather(0, NUMBERS[None]), ["index"]),
        (lambda: torch.zeros(4).scatter_add(0, NUMBERS, ROWS[0, :4]), ["copy", "index"]),
        (lambda: torch.cat([ROWS, ROWS]).half().t().contiguous(), ["copy"] * 3),
    ],
)
def test_forward(function: Any, expected: list[str]) -> None:
    assert kinds(function) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: leaf(ROWS) @ torch.ones(8, 2), "matmul"),
        (lambda: F.conv2d(leaf(X), FILTERS), "convolution"),
        (lambda: F.gelu(leaf(ROWS)), "elementwise"),
        (lambda: F.layer_norm(leaf(ROWS), (8,)), "reduction"),
        (lambda: leaf(ROWS).log_softmax(-1), "reduction"),
        (lambda: F.embedding(NUMBERS, leaf(ROWS)), "index"),
        (lambda: leaf(ROWS)[NUMBERS], "index"),
        (lambda: leaf(ROWS)[:, 1:3], "copy"),
    ],
)
def test_gradients_are_of_the_kind_of_what_they_are_of(function: Any, expected: str) -> None:
    assert expected in kinds(function, backward=True)[len(kinds(function)) :]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_skips_what_a_mask_hides_is_a_kind_of_its_own(causal: bool) -> None:
    query = torch.randn(1, 2, 8, 4, requires_grad=True)
    found = kinds(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=causal), backward=True)
    expected = "causal_attention" if causal else "attention"
    assert found.count(expected) == 2
    assert ({"attention", "causal_attention"} - {expected}).isdisjoint(found)


def test_fused_kernels_of_devices() -> None:
    library = fused_operators()
    assert kind_of(library.fused_rms_norm_backward.default, (), {}) == "reduction"
    assert kind_of(library.fused_layer_norm.default, (), {}) == "reduction"
    assert kind_of(library.fused_attention.default, (X, X, X, None, 8, True), {}) == "causal_attention"
    assert kind_of(library.fused_attention_backward.default, (*(X,) * 4, None, X, X, False, False), {}) == "attention"
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert kind_of(flash, (X, X, X, 0.0, True), {}) == "causal_attention"
    assert kind_of(flash, (X, X, X), {"is_causal": True}) == "causal_attention"
    assert kind_of(flash, (X, X, X), {}) == "attention"


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


WEIGHT = nn.Parameter(torch.randn(6, 4))
SQUARE = nn.Parameter(torch.randn(4, 4))
BIAS = nn.Parameter(torch.randn(6))
KNOWN = {id(WEIGHT): WEIGHT, id(SQUARE): SQUARE}
LINEAR_X = torch.randn(2, 3, 4)


def read(func, *args, **kwargs):
    call = read_linear(func, args, kwargs, KNOWN)
    return None if call is None else (call.output_dim, call.first_row, call.rows, call.width)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (functional.linear, (LINEAR_X, WEIGHT), (0, 0, 6, 4)),
        (functional.linear, (LINEAR_X, WEIGHT, BIAS), (0, 0, 6, 4)),
        (functional.linear, (torch.randn(2, 6), WEIGHT.t()), (1, 0, 4, 6)),
        (functional.linear, (LINEAR_X, WEIGHT[2:5]), (0, 2, 3, 4)),
        (functional.linear, (LINEAR_X, WEIGHT.chunk(3)[0]), (0, 0, 2, 4)),
        (torch.addmm, (BIAS[:4], torch.randn(2, 6), WEIGHT), (1, 0, 4, 6)),
        (torch.matmul, (LINEAR_X, WEIGHT.t()), (0, 0, 6, 4)),
        (torch.Tensor.__matmul__, (LINEAR_X, WEIGHT[2:5].t()), (0, 2, 3, 4)),
        (torch.Tensor.matmul, (torch.randn(6), WEIGHT), (1, 0, 4, 6)),
        (torch.matmul, (LINEAR_X, SQUARE), (1, 0, 4, 4)),
        (torch.matmul, (LINEAR_X, SQUARE.t()), (0, 0, 4, 4)),
    ],
)
def test_a_product_with_a_parameter_or_part_of_one_is_a_linear_layer(func, args, expected):
    assert read(func, *args) == expected


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (functional.linear, (LINEAR_X, torch.randn(6, 4))),
        (functional.linear, (LINEAR_X, WEIGHT * 2)),
        (functional.linear, (torch.randn(2, 3), WEIGHT[:, 1:])),
        (torch.matmul, (torch.randn(2, 3, 2), WEIGHT[2:4])),
        (torch.matmul, (WEIGHT, LINEAR_X.mT)),
        (torch.bmm, (LINEAR_X, LINEAR_X.mT)),
        (torch.relu, (LINEAR_X,)),
    ],
)
def test_other_calls_are_none(func, args):
    assert read(func, *args) is None


def test_named_arguments_count():
    assert read(functional.linear, LINEAR_X, weight=WEIGHT, bias=BIAS) == (0, 0, 6, 4)


def test_the_layers_inside_of_multi_head_attention_are_seen():
    class Seen(LinearMode):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.calls: list[LinearCall] = []

        def answer(self, call, compute):
            self.calls.append(call)
            return compute()

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, memory = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 5, 8)
    expected = attention(x, memory, memory)[0]
    mode = Seen({id(parameter): parameter for parameter in attention.parameters()})
    with mode:
        found = attention(x, memory, memory)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    packed = [(call.first_row, call.rows) for call in mode.calls if call.weight is attention.in_proj_weight]
    assert packed == [(0, 8), (8, 16)]
    assert [call.rows for call in mode.calls if call.weight is attention.out_proj.weight] == [8]
    # torch's own function is as it was.
    torch.testing.assert_close(attention(x, memory, memory)[0], expected, rtol=0, atol=0)
