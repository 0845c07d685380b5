import pickle
from collections import namedtuple

import torch
from torch import nn

from lightning_mist.leaves import CLASS, is_plain, on_host, plain_leaves, put_together, take_apart, with_leaves
from tests.packed import Packed, packed, table

Pair = namedtuple("Pair", "one other")


class Named(torch.Tensor):
    """Of a class, but not made of others."""


def wrapped(seed=0):
    return Packed(*packed(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).double(), table()), table())


class Twice(Packed):
    """Made of what is made of others."""

    def __tensor_flatten__(self):
        return ["codes", "scales", "table"], "twice"

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        assert context == "twice"
        return cls(**inner)


def nested():
    inner = wrapped(1)
    return {
        "step": 3,
        "plain": torch.arange(6.0),
        "class": wrapped(),
        "twice": Twice(inner, torch.ones(2), torch.zeros(3)),
        "deep": {"pair": Pair(torch.ones(2), [wrapped(2), "text", None]), 7: (torch.zeros(1),)},
    }


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        pairs = list(zip(plain_leaves(found), plain_leaves(wanted), strict=True))
        assert pairs
        for (path, one), (other_path, other) in pairs:
            assert path == other_path
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def test_leaves_are_plain_and_have_paths():
    found = dict(plain_leaves(nested()))
    assert list(found) == [
        ("plain",),
        *(("class", name) for name in ("codes", "scales", "table")),
        *(("twice", "codes", name) for name in ("codes", "scales", "table")),
        *(("twice", name) for name in ("scales", "table")),
        ("deep", "pair", 0),
        *(("deep", "pair", 1, 0, name) for name in ("codes", "scales", "table")),
        ("deep", 7, 0),
    ]
    assert all(map(is_plain, found.values()))


def test_what_is_taken_apart_is_put_together():
    state = nested()
    apart = take_apart(state)
    assert set(apart["class"]) == {"codes", "scales", "table", CLASS}
    assert_same(put_together(apart), state)
    assert_same(put_together(pickle.loads(pickle.dumps(apart))), state)
    assert_same(on_host(state), state)
    assert apart["deep"] is not state["deep"]


def test_what_is_there_twice_is_there_twice_afterwards():
    shared = torch.arange(8.0)
    asked = []

    def each(tensor):
        asked.append(tensor)
        return tensor.clone()

    found = take_apart({"a": shared, "b": [shared, shared[:4]], "empty": torch.empty(0)}, each)
    assert len(asked) == 3
    assert found["a"] is found["b"][0]


def test_classes_and_attributes_come_along():
    named, noted = torch.ones(3).as_subclass(Named), torch.zeros(2)
    named.scale, noted.is_paged = 2.0, True
    state = {"named": named, "noted": noted, "parameter": nn.Parameter(torch.ones(1))}
    assert [is_plain(value) for value in state.values()] == [False, False, True]
    found = put_together(pickle.loads(pickle.dumps(take_apart(state))))
    assert type(found["named"]) is Named
    assert (found["named"].scale, found["noted"].is_paged) == (2.0, True)
    assert torch.equal(found["named"].as_subclass(torch.Tensor), torch.ones(3))
    assert torch.equal(found["noted"], torch.zeros(2))


def test_leaves_are_replaced_where_they_are():
    state = nested()
    deep, kept = state["deep"], state["twice"]
    new = {("class", "scales"): torch.full((4,), 2.0), ("deep", "pair", 1, 0, "codes"): torch.zeros(4, 64)}
    assert with_leaves(state, new) is state
    assert state["deep"] is deep
    assert state["twice"] is kept
    assert state["class"].scales is new["class", "scales"]
    assert type(state["class"]) is Packed
    assert type(deep["pair"]) is Pair
    assert deep["pair"].other[0].codes is new["deep", "pair", 1, 0, "codes"]
