import itertools
import queue
import random
import threading

import numpy as np
import pytest
import torch

from lightning_mist.model.user_code.snapshots import Contents, Replayed, held_iterators, is_iterator


class Held:
    def __init__(self):
        self.count = 0


class Guarded(Held):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


VALUES = {
    "number": ({"a": 1}, lambda v: v.update(a=2)),
    "list": ([1], lambda v: v.append(2)),
    "nested": ([[{"a": [1]}]], lambda v: v[0][0]["a"].append(2)),
    "set": ({1}, lambda v: v.add(2)),
    "object": (Held(), lambda v: setattr(v, "count", 1)),
    "behind a lock": (Guarded(), lambda v: setattr(v, "count", 1)),
    "array": (np.zeros(3), lambda v: v.__setitem__(0, 1.0)),
    "tensor": (torch.zeros(3), lambda v: v.add_(1)),
    "python": (random.Random(1), lambda v: v.random()),
    "numpy": (np.random.default_rng(1), lambda v: v.random()),
    "numpy's older": (np.random.RandomState(1), lambda v: v.rand()),
    "torch": (torch.Generator().manual_seed(1), lambda v: torch.rand(1, generator=v)),
    "iterator": (Replayed(itertools.count()), next),
}


@pytest.mark.parametrize("name", VALUES)
def test_changes_show_and_are_put_back(name):
    value, change = VALUES[name]
    contents = Contents(with_tensors=True)
    before = contents.freeze(value)
    assert Contents(with_tensors=False).freeze(value) == before
    change(value)
    assert Contents(with_tensors=False).freeze(value) != before
    contents.restore()
    if name != "tensor":  # whose version tells that it was written to
        assert Contents(with_tensors=False).freeze(value) == before
    else:
        assert not value.any()


def test_large_containers_are_told_apart_by_length():
    value = list(range(20_000))
    frozen = Contents(with_tensors=False).freeze(value)
    value[0] = 1
    assert Contents(with_tensors=False).freeze(value) == frozen
    value.append(1)
    assert Contents(with_tensors=False).freeze(value) != frozen


def test_large_tensors_may_be_left_out():
    tensor = torch.zeros(100)
    contents = Contents(with_tensors=True, largest=10)
    contents.freeze(tensor)
    tensor.add_(1)
    contents.restore()
    assert tensor.all()


def test_items_of_an_iterator_can_be_had_again():
    iterator = Replayed(iter("abcd"))
    assert [next(iterator), next(iterator)] == ["a", "b"]
    iterator.rewind()
    assert next(iterator) == "a"
    assert iterator.given == 1
    released = iterator.release()
    assert list(released) == ["a", "b", "c", "d"]


def test_an_iterator_that_nobody_asked_is_itself_again():
    inner = iter("abcd")
    assert Replayed(inner).release() is inner


def test_a_generator_keeps_what_else_it_offers():
    def made():
        yield 1

    iterator = Replayed(made())
    iterator.close()
    assert list(iterator) == []


def test_iterators_are_found_where_they_are_held():
    held = Held()
    held.numbers = iter([1])
    space = {"a": itertools.count(), "b": [itertools.count()], "c": {"d": itertools.count()}, "held": held, "e": 1}
    found = {(id(holder), key) for holder, key in held_iterators(space, iter(space))}
    assert found == {(id(space), "a"), (id(space["b"]), 0), (id(space["c"]), "d"), (id(vars(held)), "numbers")}
    assert not is_iterator([1])
    assert not is_iterator(held)


def test_what_threads_share_is_seen_and_goes_on():
    events, shared = queue.Queue(), Held()
    shared.events, shared.own = events, [0]
    contents = Contents(with_tensors=True)
    before = contents.freeze(shared)
    events.put(1)
    shared.own.append(1)
    assert Contents(with_tensors=False).freeze(shared) != before
    contents.restore()
    # A thread may have taken it meanwhile, and say so.
    assert (events.get(), shared.own) == (1, [0])
    events.task_done()
