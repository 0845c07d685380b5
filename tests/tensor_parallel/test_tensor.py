import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import CountingGroup, SplitContext, SplitTensor, present, run_ranks, whole
from lightning_mist.tensor_parallel.tensor import layout_of, local_of, wrap

ROWS = ParameterSplit(name="weight", dim=0, factors=((6, True),))


def shown(context=None, **options):
    return present(nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), ROWS, context or SplitContext(CountingGroup(2)))


def test_it_shows_the_whole_and_computes_with_its_part():
    tensor = shown()
    assert tensor.shape == (6, 4)
    assert (tensor.ndim, tensor.dim(), len(tensor), tensor.size(0), tensor.numel()) == (2, 2, 6, 6, 24)
    assert (tensor.dtype, tensor.device.type, tensor.requires_grad, tensor.is_leaf) == (
        torch.float64,
        "cpu",
        True,
        True,
    )
    assert isinstance(tensor, nn.Parameter)
    assert local_of(tensor).shape == (3, 4)
    assert layout_of(tensor) == tensor.placement
    assert layout_of(torch.ones(2)) is None


def test_a_part_of_another_shape_is_refused():
    with pytest.raises(TraceError, match=r"a part of shape \(2, 4\).*must be of \(3, 4\)"):
        wrap(torch.ones(2, 4), shown().placement, SplitContext(CountingGroup(2)))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (copy.deepcopy, "copied deeply"),
        (pickle.dumps, "copied deeply"),
        (lambda tensor: setattr(tensor, "data", torch.ones(6, 4)), r"shape \(6, 4\) was replaced"),
        (lambda tensor: setattr(tensor, "grad", torch.ones(6, 4)), "not split alike"),
        (lambda tensor: tensor.register_hook(print), "a hook was registered"),
        (lambda tensor: tensor.detach().cumsum_(0), "cumsum_ writes into a tensor of shape"),
    ],
)
def test_what_would_see_or_change_a_part_only_is_refused(use, message):
    with pytest.raises(TraceError, match=message):
        use(shown())


def test_its_gradient_is_split_alike_and_can_be_cleared():
    tensor = shown()
    (tensor * 2.0).local.sum().backward()
    assert isinstance(tensor.grad, SplitTensor)
    assert torch.equal(tensor.grad.local, torch.full((3, 4), 2.0, dtype=torch.float64))
    tensor.grad = None
    assert tensor.local.grad is None


def test_a_function_without_a_rule_gets_the_whole_and_is_counted():
    full = torch.arange(24.0).reshape(6, 4)

    def as_rank(group):
        context = SplitContext(group)
        tensor = present(full[3 * group.rank : 3 * group.rank + 3], ROWS, context)
        return torch.linalg.matrix_norm(tensor), context.gathered, whole({"a": [tensor, 1]})

    for norm, gathered, values in run_ranks(2, as_rank):
        torch.testing.assert_close(norm, torch.linalg.matrix_norm(full))
        assert sum(gathered.values()) == 1
        assert torch.equal(values["a"][0], full)
        assert values["a"][1] == 1
