import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_mist.model.operators.linear_calls import LinearCall, LinearMode, read_linear

WEIGHT = nn.Parameter(torch.randn(6, 4))
SQUARE = nn.Parameter(torch.randn(4, 4))
BIAS = nn.Parameter(torch.randn(6))
KNOWN = {id(WEIGHT): WEIGHT, id(SQUARE): SQUARE}
X = torch.randn(2, 3, 4)


def read(func, *args, **kwargs):
    call = read_linear(func, args, kwargs, KNOWN)
    return None if call is None else (call.output_dim, call.first_row, call.rows, call.width)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (functional.linear, (X, WEIGHT), (0, 0, 6, 4)),
        (functional.linear, (X, WEIGHT, BIAS), (0, 0, 6, 4)),
        (functional.linear, (torch.randn(2, 6), WEIGHT.t()), (1, 0, 4, 6)),
        (functional.linear, (X, WEIGHT[2:5]), (0, 2, 3, 4)),
        (functional.linear, (X, WEIGHT.chunk(3)[0]), (0, 0, 2, 4)),
        (torch.addmm, (BIAS[:4], torch.randn(2, 6), WEIGHT), (1, 0, 4, 6)),
        (torch.matmul, (X, WEIGHT.t()), (0, 0, 6, 4)),
        (torch.Tensor.__matmul__, (X, WEIGHT[2:5].t()), (0, 2, 3, 4)),
        (torch.Tensor.matmul, (torch.randn(6), WEIGHT), (1, 0, 4, 6)),
        (torch.matmul, (X, SQUARE), (1, 0, 4, 4)),
        (torch.matmul, (X, SQUARE.t()), (0, 0, 4, 4)),
    ],
)
def test_a_product_with_a_parameter_or_part_of_one_is_a_linear_layer(func, args, expected):
    assert read(func, *args) == expected


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (functional.linear, (X, torch.randn(6, 4))),
        (functional.linear, (X, WEIGHT * 2)),
        (functional.linear, (torch.randn(2, 3), WEIGHT[:, 1:])),
        (torch.matmul, (torch.randn(2, 3, 2), WEIGHT[2:4])),
        (torch.matmul, (WEIGHT, X.mT)),
        (torch.bmm, (X, X.mT)),
        (torch.relu, (X,)),
    ],
)
def test_other_calls_are_none(func, args):
    assert read(func, *args) is None


def test_named_arguments_count():
    assert read(functional.linear, X, weight=WEIGHT, bias=BIAS) == (0, 0, 6, 4)


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
