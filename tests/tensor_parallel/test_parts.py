import pytest
import torch

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel.parts import shard, unshard

FUSED = ParameterSplit(name="qkv", dim=0, factors=((3, False), (8, True)))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "factors"),
    [
        ((8,), 0, ((8, True),)),
        ((24, 5), 0, ((3, False), (8, True))),
        ((5, 24), 1, ((4, True), (6, False))),
        ((2, 24, 3), 1, ((3, False), (4, True), (2, False))),
    ],
)
def test_parts_make_the_whole(shape, dim, factors, degree):
    split = ParameterSplit(name="w", dim=dim, factors=factors)
    full = torch.randn(shape)
    parts = [shard(full, split, rank, degree) for rank in range(degree)]
    assert all(tuple(part.shape) == split.local_shape(shape, degree) and part.is_contiguous() for part in parts)
    assert torch.equal(unshard(parts, split), full)


def test_which_rows_a_rank_has():
    part = shard(torch.arange(24), FUSED, 1, 2)
    assert part.tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


def test_a_part_has_its_own_memory_and_no_history():
    full = torch.randn(8, requires_grad=True)
    part = shard(full, ParameterSplit(name="w", dim=0, factors=((8, True),)), 0, 2)
    assert not part.requires_grad
    part.zero_()
    assert full.abs().min() > 0
