import pytest
import torch

from tests.tensor_parallel.rules import check, tensor

X = tensor(2, 3, 8, 4)
QKV = tensor(2, 5, 24)


@pytest.mark.parametrize(
    ("function", "share", "results"),
    [
        (lambda x: x.transpose(1, 2), 2, (1,)),
        (lambda x: torch.transpose(x, dim0=-1, dim1=-2), 2, (3,)),
        (lambda x: x.permute(3, 2, 0, 1), 2, (1,)),
        (lambda x: torch.permute(x, (0, 2, 1, 3)), 2, (1,)),
        (lambda x: x.mT, 2, (3,)),
        (lambda x: x.movedim(2, 0), 2, (0,)),
        (lambda x: torch.movedim(x, (0, 1), (-1, -2)), 2, (0,)),
        (lambda x: x.swapaxes(0, 2), 2, (0,)),
        (lambda x: x.reshape(2, 3, 32), 2, (2,)),
        (lambda x: x.view(6, 8, -1), 2, (1,)),
        (lambda x: x.reshape(-1, 4), 2, (0,)),
        (lambda x: x.reshape(-1, 4).reshape(2, 3, 8, 4), 2, (2,)),
        (lambda x: x.flatten(1, 2), 2, (1,)),
        (lambda x: x.flatten(2).unflatten(-1, (4, 8)), 2, (2,)),
        (lambda x: torch.flatten(x, start_dim=-2), 2, (2,)),
        (lambda x: x.unsqueeze(2), 2, (3,)),
        (lambda x: x.unsqueeze(-1).squeeze(-1).squeeze(), 2, (2,)),
        (lambda x: x[:, :, None].expand(2, 3, 5, 8, 4), 2, (3,)),
        (lambda x: x.repeat(1, 2, 2, 1), 2, (2,)),
        (lambda x: x.repeat_interleave(3, dim=2), 2, (2,)),
        (lambda x: torch.repeat_interleave(x, 2, dim=1), 2, (2,)),
        (lambda x: x.split(2, dim=3), 2, (2, 2)),
        (lambda x: x.split([1, 2], dim=1), 2, (2, 2)),
        (lambda x: torch.chunk(x, 2, -1), 2, (2, 2)),
        (lambda x: x.unbind(1), 2, (1, 1, 1)),
        (list, 2, (1, 1)),
        (lambda x: x[0], 2, (1,)),
        (lambda x: x[..., :2], 2, (2,)),
        (lambda x: x[:, -1, :, 1:3], 2, (1,)),
        (lambda x: x[:, 1:2, ..., None], 2, (2,)),
        (lambda x: x[..., ::2], 2, (2,)),
        (lambda x: x.narrow(1, 1, 2), 2, (2,)),
        (lambda x: x.select(1, 0), 2, (1,)),
        (lambda x: torch.stack((x, x * 2), dim=-1), 2, (2,)),
        (lambda x: torch.cat((x, x * 2), dim=-1), 2, (2,)),
        (lambda x: torch.cat((x, x * 2), dim=2), 2, (2,)),
        (lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1), 2, (2,)),
        (lambda x: torch.cat((torch.empty(0, dtype=x.dtype), x), dim=1), 2, (2,)),
        (lambda x: x.expand_as(x).view_as(x).reshape_as(x), 2, (2,)),
        (lambda x: x.sum((0, 1)).t().T, 2, (0,)),
    ],
)
def test_moving_elements(function, share, results):
    check(function, (X, share), results=results)


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (lambda x: x.split(8, dim=2), (2, 2, 2)),
        (lambda x: x.chunk(3, dim=-1), (2, 2, 2)),
        (lambda x: x.split([16, 8], -1), (2, 2)),
        (lambda x: x.view(2, 5, 3, 4, 2), (3,)),
        (lambda x: x.view(2, 5, 3, 4, 2).unbind(2), (2, 2, 2)),
        (lambda x: x.view(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4)[0], (1,)),
        (lambda x: x[..., :8] * x[..., 8:16], (2,)),
        (lambda x: x[:, 0, 16:], (1,)),
        (lambda x: torch.tensor_split(x, 3, dim=-1), (2, 2, 2)),
        (lambda x: torch.cat(x.chunk(3, -1), -1), (2,)),
        (lambda x: x.unflatten(-1, (3, 8)).flatten(-2), (2,)),
    ],
)
def test_fused_projections(function, results):
    check(function, (QKV, (2, 3)), results=results)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x[:, :, 0], "__getitem__"),
        (lambda x: x[:, :, 1:5], "__getitem__"),
        (lambda x: x[:, torch.tensor([0, 2])], "__getitem__"),
        (lambda x: x.split(3, dim=2), "split"),
        (lambda x: x.unbind(2), "unbind"),
        (lambda x: x.reshape(32, 6), "reshape"),
        (lambda x: x.roll(1, 2), "roll"),
        (lambda x: torch.cat((x, x[:, :, :4]), 2), None),
    ],
)
def test_what_cuts_through_parts_is_gathered(function, name):
    names = ("__getitem__", "cat") if name is None else (name,)
    check(function, (X, 2), gathers=names)


def test_joins_of_split_and_whole():
    check(lambda x, y: torch.cat((x, y), 1), (X, 2), (tensor(2, 2, 8, 4), None), results=(2,))
    check(lambda x, y: torch.stack((y, x)), (X, 2), (X + 1, None), results=(3,))
    check(lambda x, y: y.expand_as(x) + x, (X, 2), (tensor(8, 1), None), results=(2,))


def test_writing_to_an_index():
    def function(x, y):
        x = x * 1
        x[:, 0] = y
        x[:, 1, :, 2:] = 0.5
        return x

    check(function, (X, 2), (tensor(2, 8, 4), 1), results=(2,))
    check(function, (X, 2), (tensor(2, 8, 4), None), results=(2,))
    check(function, (X, None), (tensor(2, 8, 4), 1), results=(None,))


def test_what_conjugates_too_is_left_to_the_whole():
    x = torch.complex(tensor(4, 8), tensor(4, 8, seed=1))
    check(torch.adjoint, (x, 0), gathers=("adjoint",))
