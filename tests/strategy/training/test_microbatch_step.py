from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch

from lightning_mist.strategy.training.microbatch_step import Piece, combine, home, merged, results_in


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(0.75, torch.tensor(1.0)), (0.25, torch.tensor(5.0))], torch.tensor(2.0)),
        ([(0.75, 1.0), (0.25, 5.0)], 2.0),
        ([(0.5, torch.zeros(2, 3)), (0.5, torch.ones(1, 3))], torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3])),
        ([(0.5, "first"), (0.5, "last")], "last"),
        ([(0.5, torch.zeros(())), (0.5, "last")], "last"),
        ([(0.25, [1])], [1]),
    ],
)
def test_one_value_from_those_of_the_parts(parts, wanted):
    found = merged((), parts, {})
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def test_dictionaries_merge_by_entry_those_that_some_parts_lack_too():
    parts = [(0.5, {"a": torch.tensor(1.0), "b": "x"}), (0.5, {"a": torch.tensor(3.0), "c": torch.ones(1)})]
    assert merged((), parts, {}) == {"a": torch.tensor(2.0), "b": "x", "c": torch.ones(1)}


def test_values_travel_without_their_graph():
    leaf = torch.ones(2, requires_grad=True)
    value = {"a": leaf * 2, "b": [leaf * 3, (leaf, "text")], "c": None}
    there = home(value)
    tensors = [there["a"], there["b"][0], there["b"][1][0]]
    assert [t.tolist() for t in tensors] == [[2.0, 2.0], [3.0, 3.0], [1.0, 1.0]]
    assert not any(t.requires_grad for t in tensors)
    assert isinstance(there["b"][1], tuple)
    assert (there["b"][1][1], there["c"]) == ("text", None)
    assert value["a"].requires_grad


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    value: torch.Tensor
    name: str


def test_containers_keep_their_classes():
    leaf = torch.ones(2, requires_grad=True)
    value = {"pair": Pair(leaf * 2, 1), "record": Record(leaf * 3, "x"), "ordered": OrderedDict(a=leaf * 4)}
    found = list(results_in([value, None], {}))
    assert [tensor[0].item() for tensor in found] == [2.0, 3.0, 4.0]
    copies = {id(tensor): tensor.detach() + 10 for tensor in found}
    there = home(value, copies)
    assert isinstance(there["pair"], Pair)
    assert isinstance(there["ordered"], OrderedDict)
    assert [there["pair"].first[0].item(), there["record"].value[0].item(), there["ordered"]["a"][0].item()] == [
        12.0,
        13.0,
        14.0,
    ]
    assert (there["record"].name, value["record"].value.requires_grad) == ("x", True)


def test_what_came_home_goes_back_to_where_the_step_had_it():
    value = {"pair": Pair(torch.ones(1), 1), "record": Record(torch.ones(1), "x"), "rest": MappingProxyType({"a": 1})}
    piece = Piece(index=0, weight=1.0, loss=None, extras=home(value), records=(), random_state=None)
    there = combine([piece], torch.device("meta")).extras
    assert there["pair"].first.is_meta
    assert there["record"].value.is_meta
    assert there["rest"] == {"a": 1}
