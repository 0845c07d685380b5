import pytest
import torch
from torch import Tensor, nn

import lightning_mist
from lightning_mist.model import trace_model
from lightning_mist.model.sources.reference_decoder import hollow
from lightning_mist.model.spec import MICROBATCH
from lightning_mist.without_values import memory_rules, register_memory_rule, workspace_bytes
from tests.model.fake_steps import fakes


@torch.library.custom_op("mist_tests::widen", mutates_args=())
def widen(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


widen.register_autograd(lambda ctx, gradient: gradient[:, :4] + gradient[:, 4:])


class Net(nn.Module):
    def __init__(self, *, selects: bool) -> None:
        super().__init__()
        self.selects, self.linear = selects, nn.Linear(4, 4, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.linear(batch)
        hidden = hidden[hidden.sum(-1) > 0] if self.selects else widen(hidden)
        return hidden.exp().mean()


BATCH = torch.ones(8, 4)


def trace(module: nn.Module) -> lightning_mist.model.ModelSpec:
    return trace_model(module, BATCH, optimizer=torch.optim.SGD)


def test_a_rule_stands_in_for_a_fake_kernel() -> None:
    with lightning_mist.register_memory_rule("mist_tests::widen", lambda x: x.new_empty(x.shape[0], 2 * x.shape[1])):
        spec = trace(hollow(lambda: Net(selects=False)))
    assert not spec.notes
    # the result of exp
    assert spec.head.saved_bytes == 4 * 8 * MICROBATCH + 4
    assert spec == trace_with_fake_kernel()


def trace_with_fake_kernel() -> lightning_mist.model.ModelSpec:
    """The same network, whose operator has a fake kernel by now."""
    widen.register_fake(lambda x: x.new_empty(x.shape[0], 2 * x.shape[1]))
    return trace(hollow(lambda: Net(selects=False)))


def test_a_rule_says_how_much_a_selection_leaves() -> None:
    with register_memory_rule("aten::index.Tensor", lambda x, places: x.new_empty(x.shape[0] // 2, *x.shape[1:])):
        spec = trace(hollow(lambda: Net(selects=True)))
    assert not spec.notes
    # the mask, and the result of exp
    assert spec.head.saved_bytes == (1 + 4 * 4 // 2) * MICROBATCH + 4
    # Without the rule the size is that of the values at hand.
    assert "aten::index.Tensor" in trace(Net(selects=True)).notes[0]


def test_the_last_rule_holds_and_rules_end() -> None:
    (x,) = fakes((4, 4))
    for sizes in ((2,), (3,)):
        register_memory_rule("aten::nonzero", lambda x, size=sizes: torch.empty(size))
    first = register_memory_rule("aten::nonzero.default", lambda x: torch.empty(5), workspace=lambda x: 8 * x.numel())
    operator = torch.ops.aten.nonzero.default
    with memory_rules():
        assert x.nonzero().shape == (5,)
        assert torch.ones(2).nonzero().shape == (2, 1)
    assert workspace_bytes(operator, (x,), {}) == 128
    assert workspace_bytes(operator, (torch.ones(2),), {}) == 0
    first.remove()
    first.remove()
    assert workspace_bytes(operator, (x,), {}) == 0
    with memory_rules():
        assert x.nonzero().shape == (3,)
    from lightning_mist import without_values as module

    module._RULES.clear()
    with memory_rules(), pytest.raises(Exception, match="nonzero"):
        x.nonzero()


def test_rules_are_for_operators_by_their_full_names() -> None:
    with pytest.raises(ValueError, match="operator 'nonzero': a rule is for an operator by its full name; write mylib"):
        register_memory_rule("nonzero", lambda x: x)
