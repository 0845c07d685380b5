import pytest
import torch

from lightning_mist.tensor_parallel.shard_layout import Layout, complete_index, index, take

LAYOUT = Layout((2, 12, 4), 1, 3)


@pytest.mark.parametrize(
    "items",
    [
        (), 0, slice(1, 2), (slice(None), slice(4, 12)), (..., 0), (0, ..., slice(None, None, 2)), (None, ..., None),
        (slice(None), slice(0, 12)), (slice(None), slice(8, None), -1), (slice(None), None, slice(0, 4)),
        (slice(None), slice(4, 12), [3, -1]), ([1], ..., None), [0, 1],
    ],
)  # fmt: skip
def test_an_index_into_parts(items):
    whole = torch.arange(96).reshape(2, 12, 4)
    found = index(LAYOUT, complete_index(items, 3), 2)
    assert found is not None
    local, layout = found
    assert tuple(whole[items].shape) == layout.sizes
    for rank in range(2):
        assert torch.equal(take(whole, LAYOUT, rank, 2)[local], take(whole[items], layout, rank, 2))


@pytest.mark.parametrize(
    "items",
    [(0, 0), (0, slice(2, 6)), (0, slice(None, None, 2)), (0, slice(0, 0)), (0, slice(4, 13, 3)), (slice(None), [0])],
)
def test_what_cuts_through_parts_has_no_layout(items):
    assert index(LAYOUT, complete_index(items, 3), 2) is None


@pytest.mark.parametrize(
    "items", [torch.tensor([0]), ([0], [0]), (0, torch.tensor(1)), True, (0, slice(None), [0]), []]
)
def test_only_basic_indices_are_completed(items):
    assert complete_index(items, 3) is None
