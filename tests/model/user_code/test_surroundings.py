import itertools

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mist.model.user_code.reach import Reach
from lightning_mist.model.user_code.surroundings import Surroundings

HELD = {"count": 0}
NUMBERS = itertools.count()
ARRAY = np.zeros(2)
CACHE = {}


def numbers():
    yield from itertools.count()


class Net(nn.Module):
    count = 0

    def __init__(self, kind):
        super().__init__()
        self.kind, self.numbers, self.scale = kind, numbers(), torch.ones(1)

    def training_step(self, batch):
        return self.by_held, self.by_class, self.by_iterator, self.by_generator, self.by_array, self.by_cache

    def by_held(self):
        HELD["count"] += 1
        return HELD["count"]

    def by_class(self):
        Net.count += 1
        Net.made = True
        return Net.count

    def by_iterator(self):
        return next(NUMBERS)

    def by_generator(self):
        return next(self.numbers)

    def by_array(self):
        ARRAY[0] += 1
        return float(ARRAY[0])

    def by_cache(self):
        CACHE.setdefault("table", 7)
        return CACHE["table"]

    def run(self):
        return getattr(self, f"by_{self.kind}")()


def run(around, net):
    around.begin_run()
    try:
        return net.run()
    finally:
        around.end_run()


@pytest.mark.parametrize("kind", ["held", "class", "iterator", "generator", "array", "cache"])
def test_every_run_begins_alike_and_nothing_is_left(kind):
    net = Net(kind)
    around = Surroundings(Reach(net, net.training_step, {}))
    around.hold()
    first, second = run(around, net), run(around, net)
    changed = [name for name, _ in around.settle()]
    assert changed == {"held": ["HELD"], "class": ["count"], "iterator": ["NUMBERS"], "array": ["ARRAY"]}.get(kind, [])
    again = [run(around, net), run(around, net)]
    around.release()
    assert again == [first, first]
    assert (first == second) is (kind == "cache")
    assert "made" not in vars(Net)
    assert net.run() == first
    if kind == "class":
        del Net.made


def test_one_run_alone_counts_as_a_change():
    net = Net("held")
    around = Surroundings(Reach(net, net.training_step, {}))
    around.hold()
    run(around, net)
    assert [name for name, _ in around.settle()] == ["HELD"]
    around.release()
