from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model.trace.part_hooks import (
    RankView,
    Walk,
    dims_of,
    imitate,
    loss_of,
    parts_of,
    present_parts,
    record_answer,
)
from lightning_mist.plan import ModuleMap, ParameterSplit, ParameterUse, SequenceSplit, TensorSplit
from lightning_mist.plan.calls import intercepted
from lightning_mist.tensor_parallel import SplitTensor


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


class Pair(nn.Module):
    """Hands on its input, something made from it, a number, and a tensor that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, scale: int = 2) -> dict[str, Any]:
        return {"same": x, "made": self.linear(x) * scale, "count": scale, "index": x.detach().argmax(-1)}


def test_an_imitation_has_the_structure_shapes_and_gradients_of_the_twin() -> None:
    block, x = Pair(), torch.randn(3, 4, requires_grad=True)
    output = block(x)
    answer = record_answer((x,), {}, output, keep_values=True)
    assert answer is not None
    other = torch.randn(3, 4, requires_grad=True)
    twin = imitate(answer, Pair(), (other,), {}, None)
    assert twin["same"] is other
    assert twin["count"] == 2
    assert torch.equal(twin["made"], output["made"])
    assert torch.equal(twin["index"], output["index"])
    assert (twin["made"].requires_grad, twin["index"].requires_grad) == (True, False)
    twin["made"].sum().backward()
    assert other.grad is not None
    assert other.grad.shape == other.shape
    assert x.grad is None


def test_a_gradient_of_the_input_s_shape_is_handed_through() -> None:
    block, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    answer = record_answer((x,), {}, block(x), keep_values=True)
    assert answer is not None
    y = imitate(answer, block, (x,), {}, None)
    y.backward(torch.full((3, 4), 7.0))
    assert torch.equal(x.grad, torch.full((3, 4), 7.0))
    assert block.weight.grad is None


def test_outputs_need_a_gradient_even_if_only_the_block_s_parameters_do() -> None:
    block, x = nn.Linear(4, 4), torch.randn(3, 4)
    answer = record_answer((x,), {}, block(x), keep_values=True)
    assert answer is not None
    y = imitate(answer, block, (x,), {}, None)
    assert y.requires_grad
    y.sum().backward()
    assert block.weight.grad is None


def test_on_fakes_only_the_layout_is_kept() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        block, x = nn.Linear(4, 6), torch.randn(3, 4, requires_grad=True)
        output = block(x).t()
    answer = record_answer((x,), {}, output, keep_values=False)
    assert answer is not None
    twin = imitate(answer, block, (x,), {}, mode)
    assert (twin.shape, twin.stride(), twin.dtype) == (output.shape, output.stride(), output.dtype)
    assert twin.untyped_storage()._cdata != output.untyped_storage()._cdata


def test_the_user_may_change_what_an_imitation_returns_in_place() -> None:
    block, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    answer = record_answer((x,), {}, block(x), keep_values=True)
    assert answer is not None
    h = imitate(answer, block, (x * 1,), {}, None)
    h += 1
    h.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("thing", [object(), {1, 2}, lambda: None])
def test_what_cannot_be_described_is_not_imitated(thing: Any) -> None:
    assert record_answer((), {}, [torch.ones(2), thing], keep_values=False) is None


def test_blocks_are_intercepted_and_let_go() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    own = blocks[1].forward
    blocks[1].__dict__["forward"] = own
    seen = []

    def handler(position: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(position)
        return original(*args, **kwargs)

    x = torch.ones(1, 2)
    plain = blocks[1](blocks[0](x))
    with intercepted(blocks, lambda *called: partial(handler, *called)):
        assert torch.equal(blocks[1](blocks[0](x)), plain)
    assert seen == [0, 1]
    assert "forward" not in vars(blocks[0])
    assert blocks[1].__dict__["forward"] is own


ROWS = ParameterSplit(name="0.weight", dim=0, factors=((6, True),))
SPLIT = TensorSplit(degree=2, parameters=(ROWS,), sequence=(SequenceSplit(position=1, leaf=0, dim=1),))


def test_hidden_states_enter_only_the_blocks_that_are_said_to_take_parts():
    view = RankView.of(SPLIT, sequence_parallel=True)
    hidden = torch.ones(2, 8, 4)
    (entered,), _ = view.enter(1, (hidden,), {})
    assert isinstance(entered, SplitTensor)
    assert entered.shape == hidden.shape
    assert view.enter(0, (hidden,), {})[0][0] is hidden
    assert RankView.of(SPLIT, sequence_parallel=False).enter(1, (hidden,), {})[0][0] is hidden
    value = {"a": [entered, 3], "b": hidden}
    assert dims_of(value) == (1, None, None)
    parts = parts_of(value)
    assert parts["a"][0].shape == (2, 4, 4)
    shown = view.show(parts, dims_of(value))
    assert shown["a"][0].shape == hidden.shape
    assert shown["b"] is hidden


def test_parts_stand_in_for_parameters_that_are_shared_out():
    module, mode = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)), FakeTensorMode()
    uses = tuple(
        ParameterUse(name=f"{i}.weight", slots=((str(i), "weight", (0,)),), shape=shape, dtype="float32",
                     requires_grad=True)
        for i, shape in enumerate([(6, 4), (2, 6)])
    )  # fmt: skip
    found = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=uses)
    stand_ins = dict(module.named_parameters())
    view = RankView.of(SPLIT, sequence_parallel=False)
    part, whole = present_parts(module, tuple(stand_ins.values()), found, SPLIT, view.context, mode)
    assert isinstance(part.data, FakeTensor)
    assert part.shape == (3, 4)
    assert whole is stand_ins["1.weight"]
    assert isinstance(module[0].weight, SplitTensor)
    assert module[0].weight.shape == (6, 4)
    assert module[1].weight is whole
