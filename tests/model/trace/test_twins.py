from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.model.fakes.isolate import intercepted
from lightning_mist.model.trace.twins import imitate, record_answer


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

    def handler(position: int, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(position)
        return original(*args, **kwargs)

    x = torch.ones(1, 2)
    plain = blocks[1](blocks[0](x))
    with intercepted(blocks, handler):
        assert torch.equal(blocks[1](blocks[0](x)), plain)
    assert seen == [0, 1]
    assert "forward" not in vars(blocks[0])
    assert blocks[1].__dict__["forward"] is own
