import pytest
import torch
from torch import nn

from lightning_mist.model.spec.polynomial import CONSTANT, Basis, MisfitError
from lightning_mist.model.trace.modes import run_ways
from tests.model.trace.test_counted_step import Chain
from tests.model.trace.test_layer_costs import BASIS, subject_of


def counted(module, basis=BASIS, **how):
    with subject_of(module) as subject:
        twins = (None,) * len(module.blocks)
        return run_ways(subject, basis, lambda size: torch.ones(size[0], 4), twins, recomputes=True, **how)


def test_other_ways_are_run_at_two_sizes_and_know_the_sizes_of_all():
    ways = counted(Chain())
    assert len(ways.first.runs) == len(BASIS.sizes)
    for way in (ways.later, ways.recomputed_first, ways.recomputed_later):
        assert len(way.runs) == 2
        for run, (rows, _) in zip(way.runs, (BASIS.sizes[0], BASIS.sizes[-1]), strict=True):
            sizes = [BASIS.polynomial(size).at(rows) for size in way.sizes]
            assert sizes == [storage.bytes for storage in run.storages]
    assert ways.batch_bytes == tuple(16 * rows for rows, _ in BASIS.sizes)


def test_what_is_recomputed_has_the_size_of_what_it_repeats():
    ways = counted(Chain())
    again = [
        (s.operator, size)
        for s, size in zip(ways.recomputed_first.run.storages, ways.recomputed_first.sizes, strict=True)
        if s.cause == "recompute" and s.part == 1
    ]
    plain = [
        (s.operator, size)
        for s, size in zip(ways.first.run.storages, ways.first.sizes, strict=True)
        if s.cause == "forward" and s.part == 1
    ]
    assert again == plain
    assert len(again) == 2


def test_a_way_that_does_other_things_is_run_at_every_size():
    class Other(Chain):
        """Makes more once gradients exist."""

        def training_step(self, x):
            has_gradient = self.outlet.weight.grad is not None
            return super().training_step(x) + ((x + 1).sum() * 2 if has_gradient else 0)

    ways = counted(Other())
    assert len(ways.later.runs) == len(BASIS.sizes)
    run = ways.later.runs[1]
    assert [BASIS.polynomial(size).at(BASIS.sizes[1][0]) for size in ways.later.sizes] == [
        s.bytes for s in run.storages
    ]


def test_caches_that_a_first_run_fills_are_not_counted():
    class Caching(Chain):
        def __init__(self):
            super().__init__()
            self.mask = None

        def training_step(self, x):
            if self.mask is None or self.mask.shape != x.shape:
                self.mask = torch.ones_like(x) * 2
            return super().training_step(x * self.mask)

    ways = counted(Caching())
    assert {run.forward[0].operators for run in ways.first.runs} == {2}
    assert len(ways.later.runs) == 2


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: [x + 1 for _ in range(len(x))].pop(), "the number of allocations depends on the size"),
        (lambda x: x + 1 if len(x) % 2 else x * 1, "is another one at other sizes"),
        (lambda x: x.new_ones(len(x) ** 3)[: len(x), None] * x, "the size of an allocation by aten.new_ones"),
    ],
)
def test_allocations_that_cannot_be_matched_are_refused(step, words):
    class Odd(Chain):
        def training_step(self, x):
            return super().training_step(step(x))

    with pytest.raises(MisfitError, match=words):
        counted(Odd())


def test_a_constant_basis_has_one_size():
    ways = counted(Chain(), Basis(powers=CONSTANT, points=((5, 1),), check=None))
    assert [len(way.runs) for way in (ways.first, ways.later)] == [1, 1]
    assert isinstance(ways.first.run.storages, tuple)


def test_without_blocks_there_are_two_ways():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.inner = (), nn.Linear(4, 1)

        def training_step(self, x):
            return self.inner(x).sum()

    ways = counted(Flat())
    assert ways.recomputed_first is ways.first
    assert ways.recomputed_later is ways.later
