import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.trace.part_hooks import Walk, loss_of


class Opaque(nn.Module):
    def forward(self, x):
        return x * 2, object()


def blocks_of(count):
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count)]


def follow(blocks, *, twins=None, recompute=False, keep_values=True):
    """The events, the walk and the input's gradient of a step through blocks, the last one's output squared."""
    events = []
    walk = Walk(
        blocks,
        twins or (None,) * len(blocks),
        lambda part, backward: events.append((part, backward)),
        recompute=recompute,
        mode=None,
        keep_values=keep_values,
    )
    x = torch.ones(2, 3, requires_grad=True)
    with walk.step():
        h = x * 1
        for block in blocks:
            h = block(h)
        loss = (h * h).sum()
        walk.begin_backward()
        loss.backward()
    return events, walk, x.grad


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_begin_in_order_forward_and_back(recompute):
    events, walk, _ = follow(blocks_of(3), recompute=recompute)
    assert events == [*((part, False) for part in (1, 2, 3, 4)), *((part, True) for part in (4, 3, 2, 1, 0))]
    assert walk.entering == [((2, 3),)] * 3
    assert walk.inputs == [(((2, 3), (3, 1), torch.float32, True),)] * 3


def test_without_blocks_the_head_is_the_whole_step():
    assert follow([])[0] == [(0, True)]


def test_watching_and_recomputing_change_no_gradient_and_leave_no_hook():
    blocks = blocks_of(2)
    x = torch.ones(2, 3, requires_grad=True)
    blocks[1](blocks[0](x)).square().sum().backward()
    wanted = [p.grad.clone() for block in blocks for p in block.parameters()]
    for recompute in (False, True):
        for block in blocks:
            block.zero_grad()
        _, walk, gradient = follow(blocks, recompute=recompute)
        assert torch.equal(gradient, x.grad)
        assert all(
            torch.equal(p.grad, w)
            for p, w in zip((p for block in blocks for p in block.parameters()), wanted, strict=True)
        )
        assert walk.answers == {}
        assert all(type(block).forward is nn.Sequential.forward and "forward" not in vars(block) for block in blocks)


def test_a_twin_answers_without_running():
    blocks = blocks_of(3)
    calls = []
    for index, block in enumerate(blocks):
        block[0].register_forward_hook(lambda *_, index=index: calls.append(index))
    events, walk, _ = follow(blocks, twins=(None, 0, None))
    assert calls == [0, 2]
    assert events[-5:] == [(part, True) for part in (4, 3, 2, 1, 0)]
    assert walk.inputs[1] == walk.inputs[0]


def test_a_block_that_returns_unknown_objects_has_no_twin():
    class Chain(Opaque):
        def forward(self, x):
            return super().forward(x[0] if isinstance(x, tuple) else x)

    walk = Walk([Chain(), Chain()], (None, 0), lambda *_: None, recompute=False, mode=None, keep_values=True)
    first, second = walk._blocks
    with pytest.raises(TraceError, match="block 1 cannot be answered for: its twin 0"), walk.step():
        second(first(torch.ones(2)))


def test_the_loss_of_what_a_step_returned():
    loss = torch.ones((), requires_grad=True) * 2
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "extra": 1}) is loss


@pytest.mark.parametrize("value", [None, {}, {"loss": 1.0}, [torch.ones(())]])
def test_a_step_without_a_loss_is_refused(value):
    with pytest.raises(TraceError, match=f"the step returned {type(value).__name__} without a loss"):
        loss_of(value)


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(TraceError, match="does not depend on any trained parameter"):
        loss_of({"loss": torch.ones(())})
