import pytest
import torch

from lightning_mist.errors import TraceError
from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import (
    CountingGroup,
    SplitContext,
    SplitTensor,
    layout_of,
    local_of,
    present,
    shard,
    unshard,
)
from lightning_mist.tensor_parallel.shard_layout import Layout

FUSED = ParameterSplit(name="qkv.weight", dim=0, factors=((3, False), (8, True), (2, False)))


def test_shares_as_the_factors_say():
    full = torch.arange(48 * 5.0).reshape(48, 5)
    parts = [shard(full, FUSED, rank, 4) for rank in range(4)]
    rows = full.reshape(3, 4, 4, 5)
    assert all(torch.equal(part, rows[:, rank].reshape(12, 5)) for rank, part in enumerate(parts))
    assert all(part.is_contiguous() and part.untyped_storage().nbytes() == 12 * 5 * 4 for part in parts)
    assert FUSED.local_shape((48, 5), 4) == tuple(parts[0].shape)
    assert torch.equal(unshard(parts, FUSED), full)


def test_other_dimensions():
    split = ParameterSplit(name="w", dim=1, factors=((6, True),))
    full = torch.arange(24).reshape(4, 6)
    parts = [shard(full, split, rank, 3) for rank in range(3)]
    assert torch.equal(parts[1], full[:, 2:4])
    assert torch.equal(unshard(parts, split), full)


def test_what_does_not_divide_is_refused():
    with pytest.raises(TraceError, match=r"qkv.weight of shape \(48, 5\).*factor of 8 must be a multiple of 3"):
        shard(torch.zeros(48, 5), FUSED, 0, 3)
    with pytest.raises(TraceError, match=r"qkv.weight of shape"):
        shard(torch.zeros(24, 5), FUSED, 0, 2)


def test_parts_of_another_shape_are_refused():
    with pytest.raises(TraceError, match=r"a part of shape \(11, 5\)"):
        SplitTensor(torch.zeros(11, 5), Layout((48, 5), 0, 3), SplitContext(CountingGroup(4)))


def test_presents_the_whole_shape():
    context = SplitContext(CountingGroup(4))
    local = torch.nn.Parameter(torch.zeros(12, 5))
    shown = present(local, FUSED, context)
    assert shown.shape == (48, 5)
    assert local_of(shown) is local
    assert layout_of(shown) == Layout((48, 5), 0, 3)
    assert isinstance(shown, torch.nn.Parameter)
    assert layout_of(local) is None
    assert local_of(local) is local
