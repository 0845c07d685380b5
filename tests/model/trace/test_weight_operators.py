import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_mist.model.trace.ledger import Ledger
from lightning_mist.model.trace.weight_operators import LinearCounter, WeightOperands

ROWS, INSIDE, OUTSIDE = 6, 5, 3


def counted(function, *parameters):
    ledger = Ledger(1)
    with ledger, LinearCounter(ledger, parameters):
        function()
    return ledger.forward[0].weight_flops, ledger.forward[0].weight_bytes


X = torch.randn(2, 3, INSIDE)
WEIGHT = nn.Parameter(torch.randn(OUTSIDE, INSIDE))
ACROSS = nn.Parameter(torch.randn(INSIDE, OUTSIDE))
BIAS = nn.Parameter(torch.randn(OUTSIDE))
ONCE = (2 * ROWS * INSIDE * OUTSIDE, 4 * ROWS * (INSIDE + OUTSIDE))


@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda: F.linear(X, WEIGHT, BIAS), WEIGHT),
        (lambda: torch.addmm(BIAS, X.view(ROWS, INSIDE), ACROSS), ACROSS),
        (lambda: X @ ACROSS, ACROSS),
        (lambda: torch.matmul(X, ACROSS), ACROSS),
    ],
)
def test_every_way_to_apply_a_matrix(function, weight):
    assert counted(function, weight) == ONCE
    # Of another parameter, or a frozen one, nothing is put off.
    assert counted(function, BIAS) == (0, 0)


def test_an_input_of_several_matrices_is_kept_once():
    def both():
        F.linear(X, WEIGHT)
        X @ ACROSS

    flops, kept = counted(both, WEIGHT, ACROSS)
    assert flops == 2 * ONCE[0]
    assert kept == 4 * ROWS * (INSIDE + 2 * OUTSIDE)


def test_an_input_that_is_gone_is_another():
    def in_turn():
        for _ in range(3):
            F.linear(torch.randn(2, 3, INSIDE), WEIGHT)

    assert counted(in_turn, WEIGHT) == (3 * ONCE[0], 3 * ONCE[1])


def test_frozen_matrices_have_no_gradient_to_put_off():
    frozen = nn.Parameter(torch.randn(OUTSIDE, INSIDE), requires_grad=False)
    assert counted(lambda: F.linear(X, frozen), frozen) == (0, 0)


def test_what_gradients_of_weights_are_made_of():
    ledger = Ledger(3)
    operands = WeightOperands(ledger, {id(WEIGHT): "blocks.0.fc.weight"}, ["blocks.0"])
    with ledger, operands:
        ledger.enter(1)
        value = X * 2.0
        product = F.linear(value, WEIGHT, BIAS)
        loss = (product.tanh() * 3.0).sum()
        F.linear(value, ACROSS.t())
        ledger.enter(1, backward=True)
        loss.backward()
    noted = {storage.operator: storage.weights for storage in ledger.storages if storage.weights}
    assert noted == {
        "aten.mul.Tensor": [(1, "fc.weight")],
        "aten.tanh_backward.default": [(1, "fc.weight")],
    }
    WEIGHT.grad = BIAS.grad = None
