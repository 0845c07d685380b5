import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from lightning_mist.tensors import batch_rows, copy_batch, is_hollow, slice_rows

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list
    scale: float


def x(rows=4):
    return torch.arange(rows * 3).view(rows, 3)


def test_tensors_texts_and_scalars_of_nested_containers():
    batch = {"a": x(), "b": [x(), (x()[:, 0], 7)], "t": ["p", "q", "r", "s"], "k": ("1", "2", "3", "4"), "n": None}
    batch |= {"meta": ["one", "two"], "zero": torch.tensor(3.0), "np": np.arange(4)}
    assert batch_rows(batch) == 4
    part = slice_rows(batch, 1, 3)
    assert torch.equal(part["a"], x()[1:3])
    assert torch.equal(part["b"][0], x()[1:3])
    assert torch.equal(part["b"][1][0], x()[1:3, 0])
    assert part["b"][1][1] == 7
    assert part["t"] == ["q", "r"]
    assert part["k"] == ("2", "3")
    assert part["meta"] == ["one", "two"]
    assert part["zero"].ndim == 0
    assert part["np"].tolist() == [1, 2]
    assert batch["a"].shape == (4, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pair(x(), x()),
        lambda: Sample(x(), list("abcd"), 0.5),
        lambda: OrderedDict(x=x(), y=x()),
        lambda: [x(), x()],
        x,
    ],
)
def test_container_classes_are_kept(make):
    batch = make()
    assert batch_rows(batch) == 4
    part = slice_rows(batch, 0, 1)
    assert type(part) is type(batch)
    assert batch_rows(part) == 1


def test_tokenizer_output():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": x(), "labels": x()})
    part = slice_rows(batch, 2, 4)
    assert type(part) is type(batch)
    assert torch.equal(part["labels"], x()[2:])
    assert batch["labels"].shape[0] == 4


def test_parts_cover_every_row_once():
    batch = {"x": x(7)}
    parts = [slice_rows(batch, 7 * p // 3, 7 * (p + 1) // 3)["x"] for p in range(3)]
    assert torch.equal(torch.cat(parts), x(7))


@pytest.mark.parametrize(
    "batch",
    [
        {"x": x(4), "y": x(3)},
        {"x": 3},
        [torch.tensor(1.0)],
        {"x": x(), "graph": object()},
        (x(2), [{"boxes": x(2)}, {"boxes": x(2)}]),
        {"x": x().to_sparse()},
    ],
    ids=["sizes differ", "no tensor", "scalar", "unknown class", "list per row", "sparse"],
)
def test_what_has_no_certain_rows_is_used_whole(batch):
    assert batch_rows(batch) is None
    with pytest.raises(ValueError, match="has no rows to cut"):
        slice_rows(batch, 0, 1)


def test_rows_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match="rows 2 to 5 of a batch of 4 rows"):
        slice_rows({"x": x()}, 2, 5)


def test_copies_can_be_emptied():
    batch = {"x": x(), "inner": {"y": x()}}
    again = copy_batch(batch)
    assert again["x"] is batch["x"]
    again["inner"].pop("y")
    again.pop("x")
    assert set(batch) == {"x", "inner"}
    assert set(batch["inner"]) == {"y"}


def test_what_has_less_memory_than_its_elements_take_is_hollow():
    assert is_hollow(torch.zeros(()).expand(3, 4))
    assert is_hollow(torch.empty(3, device="meta"))
    assert not is_hollow(torch.zeros(3, 4))
    assert not is_hollow(torch.zeros(4, 4)[1:, ::2])
