import pytest
import torch
import torch.nn.functional as F

from tests.tensor_parallel.rules import check, tensor

X = tensor(2, 8, 6, 4)


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (lambda x: x.sum(-1), (1,)),
        (lambda x: x.mean((0, 2), keepdim=True), (1,)),
        (lambda x: x.pow(2).mean(-1, keepdim=True), (1,)),
        (lambda x: x.sum(0), (0,)),
        (lambda x: x.sum(), (None,)),
        (lambda x: x.mean(), (None,)),
        (lambda x: x.mean(1), (None,)),
        (lambda x: torch.sum(x, dim=(1, 2), keepdim=True), (None,)),
        (lambda x: torch.mean(x, dim=[1, -1]), (None,)),
        (lambda x: x.sum(1, dtype=torch.float32).double(), (None,)),
        (lambda x: x.amax(-1), (1,)),
        (lambda x: x.max(dim=-1).values, (1,)),
        (lambda x: torch.max(x, x * 2), (1,)),
        (lambda x: x.min(2, keepdim=True)[0], (1,)),
        (lambda x: x.var(-1, unbiased=False), (1,)),
        (lambda x: x.std(dim=-1, keepdim=True), (1,)),
        (lambda x: x.norm(dim=-1), (1,)),
        (lambda x: torch.logsumexp(x, -1), (1,)),
        (lambda x: (x > 0).any(-1) * x.sum(-1), (1,)),
        (lambda x: F.normalize(x, dim=-1), (1,)),
        (lambda x: x.cumsum(-1), (1,)),
        (lambda x: x.flip(-1), (1,)),
        (lambda x: x.flip(2, 3), (1,)),
        (lambda x: x.sort(-1).values, (1,)),
        (lambda x: x.topk(2, dim=-1).values, (1,)),
        (lambda x: F.glu(x, -1), (1,)),
        (lambda x: F.softmax(x, -1), (1,)),
        (lambda x: x.softmax(dim=2), (1,)),
        (lambda x: torch.log_softmax(x, dim=-1), (1,)),
        (lambda x: F.softmax(x, dim=-1, dtype=torch.float32).double(), (1,)),
        (lambda x: F.softmax(x, 1), (1,)),
        (lambda x: F.log_softmax(x, dim=1), (1,)),
        (lambda x: F.pad(x, (1, 0, 0, 2)), (1,)),
        (lambda x: F.pad(x, (1, 0, 0, 2, 0, 0, 1, 1)), (1,)),
        (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6), (1,)),
    ],
)
def test_along_dimensions(function, results):
    check(function, (X, 1), results=results, tolerance=1e-6 if "float32" in str(function.__code__.co_names) else 1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax(1), lambda x: x.max(), lambda x: x.max(1).values, lambda x: x.std(), lambda x: x.cumsum(1),
        lambda x: x.std(-1, False), lambda x: x.flip(2, 1), lambda x: x.topk(2, dim=1).values, lambda x: x.norm(),
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), lambda x: x.flip(1),
    ],
)  # fmt: skip
def test_along_the_shared_dimension_others_gather(function):
    name = {"F": "pad"}.get(function.__code__.co_names[0], function.__code__.co_names[0])
    check(function, (X, 1), gathers=(name,))


def test_norms():
    weight, bias = tensor(4), tensor(4, seed=1)
    check(lambda x, w, b: F.layer_norm(x, (4,), w, b), (X, 1), (weight, None), (bias, None), results=(1,))
    check(lambda x, w: F.rms_norm(x, (4,), weight=w), (X, 1), (weight, None), results=(1,))
    check(lambda x, w: F.layer_norm(x, (4,), w), (X, 1), (weight, 0), results=(1,))
    check(lambda x: F.layer_norm(x, (6, 4)), (X, 1), results=(1,))
    check(
        lambda x, w: F.layer_norm(x, (4,), w), (X, 3), (weight, 0), gathers=("layer_norm",), results=(None,)
    )  # of what is shared itself
