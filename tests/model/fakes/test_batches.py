from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mist.model.fakes.batches import resize_batch, sequence_length
from lightning_mist.model.spec.polynomial_fit import BILINEAR, CONSTANT, QUADRATIC
from lightning_mist.model.trace.sizes import bases, sized
from lightning_mist.tensors import batch_rows, batch_tensors

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    ids: torch.Tensor
    names: list[str]


def ids(rows: int = 2, length: int = 8) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


def test_rows_repeat_and_positions_are_thinned_out_from_end_to_end() -> None:
    batch = resize_batch({"ids": ids(), "scale": torch.tensor(2.0)}, 3, 4)
    assert batch["ids"].tolist() == [[0, 2, 4, 7], [8, 10, 12, 15], [0, 2, 4, 7]]
    assert batch["scale"].item() == 2.0


def test_padding_at_either_end_stays_in_a_shorter_batch() -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = 0
    mask[1, -2:] = 0
    for length in (3, 6, 9):
        shorter = resize_batch({"mask": mask}, 2, length)["mask"]
        assert shorter.shape == (2, length)
        assert shorter[0, 0] == 0
        assert shorter[1, -1] == 0


def test_masks_of_two_positions_are_thinned_in_both() -> None:
    batch = resize_batch((ids(), torch.ones(2, 1, 8, 8)), 2, 4)
    assert batch[1].shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    "batch",
    [
        [ids(), ids()],
        Pair(ids(), ids()),
        {"a": {"b": ids()}},
        UserDict(a=ids()),
        Record(ids=ids(), names=["one", "two"]),
    ],
    ids=["list", "named tuple", "nested", "mapping", "dataclass"],
)
def test_containers_keep_their_type(batch: Any) -> None:
    resized = resize_batch(batch, 4, 4)
    assert type(resized) is type(batch)
    assert all(tensor.shape == (4, 4) for tensor in batch_tensors(resized))
    if isinstance(resized, Record):
        assert resized.names == ["one", "two", "one", "two"]


def test_length_is_told_only_where_tensors_agree() -> None:
    assert sequence_length({"ids": ids(), "labels": torch.zeros(2)}) == 8
    assert sequence_length((ids(2, 8), ids(2, 9))) is None
    assert sequence_length(torch.ones(2, 8)) is None  # numbers are no tokens
    with pytest.raises(ValueError, match="rows of a batch"):
        resize_batch((torch.ones(3), torch.ones(4)), 2, None)


def test_arrays_and_lists_of_one_value_per_row_are_resized_as_tensors_are() -> None:
    batch = {"ids": ids(), "array": np.arange(16).reshape(2, 8), "text": ("a", "b"), "about": [{"id": 1}, {"id": 2}]}
    resized = resize_batch(batch, 3, 4)
    assert resized["array"].tolist() == resized["ids"].tolist()
    assert resized["text"] == ("a", "b", "a")
    assert resized["about"] == [{"id": 1}, {"id": 2}, {"id": 1}]


@pytest.mark.parametrize(
    "batch",
    [{"x": ids(), "graph": object()}, {"x": ids(), "s": ids().to_sparse()}, (ids(), [{"x": ids()}, {"x": ids()}])],
    ids=["unknown class", "layout", "ambiguous list"],
)
def test_batches_that_the_runtime_would_not_cut_are_counted_as_they_are(batch: Any) -> None:
    assert batch_rows(batch) is None
    with pytest.raises(ValueError, match="must share dimension 0"):
        resize_batch(batch, 2, None)
    assert [basis.powers for basis in bases(batch, real=False)] == [CONSTANT]


def test_sizes_to_try_go_from_sequences_to_rows_to_nothing() -> None:
    assert [basis.powers for basis in bases(ids(2, 8), real=False)] == [BILINEAR, QUADRATIC, CONSTANT]
    assert [basis.powers for basis in bases(torch.ones(2, 8), real=False)] == [QUADRATIC, CONSTANT]
    assert [basis.powers for basis in bases((torch.ones(2), torch.ones(3)), real=False)] == [CONSTANT]
    first = next(bases(ids(2, 4096), real=True))
    assert max(s for _, s in first.sizes) == 64
    batch = sized(ids(2, 8), next(bases(ids(2, 8), real=False)), (6, 6), None)
    assert batch.shape == (6, 6)
