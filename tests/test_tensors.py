import dataclasses
from collections import OrderedDict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_mist.tensors import batch_rows, batch_signature, copy_batch, is_hollow, leaves, rebuild, slice_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR"),
]

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


class Looks(namedtuple("Looks", ["x", "y"])):
    """Its constructor looks at members."""

    def __new__(cls, x, y):
        assert x.device == y.device
        return super().__new__(cls, x, y)


class Pairs(list):
    def __init__(self, x, y):
        super().__init__([x, y])


class Joined(tuple):
    def __new__(cls, x, y):
        made = super().__new__(cls, (x, y))
        made.name = "joined"
        return made


@pytest.mark.parametrize(
    "batch",
    [
        Looks(x(), x()),
        Pairs(x(), x()),
        Joined(x(), x()),
        MappingProxyType({"x": x()}),
        deque([x(), x()]),
        torch.max(x(), 0),
        pack_sequence([x(3), x(2)]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_containers_are_made_again_without_their_constructors(batch):
    again = rebuild(batch, lambda leaf: "there" if isinstance(leaf, torch.Tensor) else None)
    assert type(again) is type(batch)
    assert vars(again) == vars(batch) if isinstance(batch, Joined) else True
    assert {leaf for leaf in leaves(again) if leaf is not None} == {"there"}


class Store:
    """No container that anybody knows; it holds values in a dictionary."""

    def __init__(self):
        self.held = {"x": x(), "y": x()}


def test_copies_of_objects_can_be_emptied():
    batch = {"graph": Store()}
    again = copy_batch(batch)
    tensor = again["graph"].held.pop("x")
    assert tensor is batch["graph"].held["x"]


class Carries(torch.Tensor):
    pass


def carries():
    made = x().double().as_subclass(Carries)
    made.meta = {"name": "a"}
    return made


UNUSUAL = {
    "jagged": lambda: torch.nested.nested_tensor([x(2).double(), x(3).double()], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([x(2).double(), x(3).double()]),
    "sparse": lambda: x().double().to_sparse(),
    "sparse rows": lambda: x().double().to_sparse_csr(),
    "subclass": carries,
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_copied_and_have_no_rows_unless_dense(kind):
    batch = {"x": UNUSUAL[kind]()}
    again = copy_batch(batch, with_tensors=True)["x"]
    assert type(again) is type(batch["x"])
    assert again is not batch["x"]
    assert again.layout == batch["x"].layout
    assert vars(again).get("meta") == vars(batch["x"]).get("meta")
    assert batch_rows(batch) == (4 if kind == "subclass" else None)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_ragged_batches_are_told_apart_by_their_rows(layout):
    def ragged(*sizes):
        return batch_signature({"x": torch.nested.nested_tensor([torch.ones(n, 3) for n in sizes], layout=layout)})

    assert ragged(2, 3) == ragged(2, 3)
    assert len({ragged(2, 3), ragged(1, 4), ragged(2, 3, 4)}) == 3


def test_a_tensor_with_a_graph_is_not_copied():
    with pytest.raises(RuntimeError):
        copy_batch([torch.ones(2, requires_grad=True) * 2], with_tensors=True)


def test_what_has_less_memory_than_its_elements_take_is_hollow():
    assert is_hollow(torch.zeros(()).expand(3, 4))
    assert is_hollow(torch.empty(3, device="meta"))
    assert not is_hollow(torch.zeros(3, 4))
    assert not is_hollow(torch.zeros(4, 4)[1:, ::2])


class Node:
    """Knows its neighbours, and a class, as nodes of graphs and their libraries' batches do."""

    def __init__(self, size=2):
        self.x, self.near, self.made_by = torch.zeros(size), [], Node


def test_the_signature_of_objects_that_know_one_another_and_classes_ends():
    def linked(*sizes):
        nodes = [Node(size) for size in sizes]
        for node in nodes:
            node.near = nodes
        return {"nodes": nodes}

    assert batch_signature(linked(*[2] * 8)) == batch_signature(linked(*[2] * 8))
    assert batch_signature(linked(*[2] * 8)) != batch_signature(linked(*[2] * 7, 3))


def test_what_a_container_keeps_by_row_beside_tensors_keeps_the_batch_whole():
    assert batch_rows({"x": torch.zeros(4, 2), "names": deque("abcd")}) is None
    assert batch_rows({"x": torch.zeros(4, 2), "more": deque([torch.zeros(4)])}) == 4


def test_functions_in_a_batch_do_not_lead_to_all_of_a_program():
    signature = batch_signature({"function": torch.nn.functional.relu, "method": [].append})
    assert len(repr(signature)) < 300
