import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.trace.ledger import Ledger
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
