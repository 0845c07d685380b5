from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_mist.model.device.kernels import fused_operators
from lightning_mist.model.operators.operator_costs import computes, tensors_in
from lightning_mist.model.operators.operator_kinds import kind_of
from lightning_mist.model.spec.model_spec import KINDS
from tests.model.operators.test_operator_costs import Calls

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


def test_every_kind_is_named_once() -> None:
    assert len(set(KINDS)) == len(KINDS) == 8
