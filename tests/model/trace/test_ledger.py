import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.trace.ledger import Ledger, ParameterProducts
from lightning_mist.without_values import register_memory_rule


def test_peak_and_saved_bytes_of_a_chain_computed_by_hand() -> None:
    x = torch.ones(10)
    with torch.no_grad(), Ledger(2) as ledger:
        y = x + 1  # 40 bytes
        z = y * 2  # 80 alive
        del y  # 40
        ledger.enter(1)
        w = z.view(2, 5).t().contiguous()  # 80
        del z
        v = w.sum()  # 40 + 4
    assert ledger.forward[0].timeline == [0, 40, 80]
    assert ledger.forward[1].timeline == [40, 80, 44]
    assert [(s.bytes, s.part, s.born, s.died) for s in ledger.storages] == [
        (40, 0, 1, 3),
        (40, 0, 2, 5),
        (40, 1, 4, None),
        (4, 1, 5, None),
    ]
    del w, v
    assert ledger.live_bytes == 0


def test_what_existed_before_is_not_counted_however_it_is_viewed_or_changed() -> None:
    x = torch.ones(4, 4)
    with torch.no_grad(), Ledger(1) as ledger:
        x.t().add_(1)
        x[1:].mul_(2)
    assert ledger.live_bytes == 0
    assert ledger.forward[0].operators == 2


def test_an_operator_that_resizes_its_output_is_followed() -> None:
    out = torch.empty(0)
    with torch.no_grad(), Ledger(1) as ledger:
        made = torch.empty(2)
        torch.add(torch.ones(100), 1, out=made.resize_(0))
    assert ledger.forward[0].timeline[-1] >= 400
    del out


def test_backward_is_counted_where_it_was_entered() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    with Ledger(1) as ledger:
        loss = (torch.ones(2, 8) @ weight).sum()
        ledger.enter(0, backward=True)
        loss.backward()
    assert ledger.forward[0].flops == 2 * 2 * 8 * 8
    assert ledger.backward[0].flops == 2 * 2 * 8 * 8  # the gradient of the weight only


def test_reading_a_fake_number_is_answered_and_noted_and_a_real_one_is_not_guessed() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(())
    with Ledger(1) as ledger:
        assert fake.item() == 1.0
        assert not bool(fake > 3)
        assert torch.tensor(5.0).item() == 5.0
    ((first, once), (second, again)) = ledger.guesses.reads
    assert (once, again) == (1, 1)
    assert first.partition("test_ledger.py:")[2] < second.partition("test_ledger.py:")[2]


def test_what_an_operator_needs_while_it_runs_is_alive_then_only() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(4, 4)
    with register_memory_rule("aten::exp", torch.empty_like, workspace=lambda x: 3 * x.numel()), Ledger(1) as ledger:
        made = fake.exp()
        made.add_(1)
    assert ledger.forward[0].timeline == [0, 64 + 48, 64, 64]
    needed = next(storage for storage in ledger.storages if storage.bytes == 48)
    assert (needed.operator, needed.born, needed.died) == ("aten.exp.default (workspace)", 1, 2)


def test_a_loop_that_waits_for_a_value_is_ended() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ones(())

    def wait(value: torch.Tensor) -> None:
        while value.item() > 0.5:
            value = value / 2

    with Ledger(1), pytest.raises(TraceError, match=r"values into Python \d+ times at \S*test_ledger.py:\d+: a loop"):
        wait(fake)


ROWS, INSIDE, OUTSIDE = 6, 5, 3


def counted(function, *parameters):
    ledger = Ledger(1)
    with ledger, ParameterProducts(ledger, parameters):
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
        (lambda: X.view(ROWS, INSIDE).mm(ACROSS), ACROSS),
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
    operands = ParameterProducts(ledger, (WEIGHT,), {id(WEIGHT): "blocks.0.fc.weight"}, ["blocks.0"])
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


def noted_under_autocast(function):
    """What is noted of a step under autocast, by operator and type."""
    ledger = Ledger(3)
    names = {id(WEIGHT): "blocks.0.fc.weight", id(ACROSS): "blocks.0.across"}
    operands = ParameterProducts(ledger, (WEIGHT, ACROSS), names, ["blocks.0"])
    with ledger, operands, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ledger.enter(1)
        loss = function(X * 2.0)
        ledger.enter(1, backward=True)
        loss.backward()
    WEIGHT.grad = BIAS.grad = ACROSS.grad = None
    return [(s.operator, s.dtype, s.weights) for s in ledger.storages if s.weights]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda value: F.linear(value, WEIGHT, BIAS), "fc.weight"),
        (lambda value: F.linear(input=value, weight=WEIGHT), "fc.weight"),
        (lambda value: torch.addmm(BIAS, value.view(ROWS, INSIDE), ACROSS), "across"),
        (lambda value: value @ ACROSS, "across"),
    ],
)
def test_of_what_autocast_casts_its_copy_waits(function, name):
    noted = noted_under_autocast(lambda value: (function(value).float().tanh() * 3.0).sum())
    assert len(noted) == 2
    assert noted[0] == ("aten._to_copy.default", "bfloat16", [(1, name)])
    assert noted[1][1:] == ("bfloat16", [(1, name)])


def test_every_product_casts_a_copy_of_its_own():
    def both(value):
        return (F.linear(value, WEIGHT).float() + (value @ ACROSS).float()).tanh().sum()

    noted = noted_under_autocast(both)
    copies = [weights for operator, _, weights in noted if operator == "aten._to_copy.default"]
    assert [(1, "fc.weight")] in copies
    assert [(1, "across")] in copies


def test_what_is_in_the_type_of_the_product_waits_itself():
    def twice(value):
        narrow = value.to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            other = F.linear(value, WEIGHT)
        return ((narrow @ ACROSS).float() + other).sum()

    noted = {operator: (dtype, weights) for operator, dtype, weights in noted_under_autocast(twice)}
    assert noted["aten.mul.Tensor"] == ("float32", [(1, "fc.weight")])
    assert noted["aten._to_copy.default"] == ("bfloat16", [(1, "across")])


def test_what_autocast_casts_is_counted_in_the_type_of_the_product():
    def both():
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(X, WEIGHT)
            X @ ACROSS

    assert counted(both, WEIGHT, ACROSS) == (2 * ONCE[0], 2 * ONCE[1] // 2)
