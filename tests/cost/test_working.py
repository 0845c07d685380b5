import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.working import RangeTable, Sharding, WorkingSets, range_maxima
from tests.specs import spec


def test_range_maxima():
    values = np.array([3.0, -1.0, 4.0, 1.0])
    table = range_maxima(values)
    for start, end in itertools.combinations_with_replacement(range(5), 2):
        assert table[start, end] == max(values[start:end], default=-np.inf)
    assert range_maxima(np.array([])).tolist() == [[-np.inf]]


def test_a_range_table_is_about_what_a_run_adds():
    kept, plain = np.array([3.0, -1.0, 4.0]), np.array([2.0, 9.0, 5.0])
    below = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 4.0, 8.0, 12.0])
    table = RangeTable.of((kept, plain), below)
    for start, end in itertools.combinations(range(4), 2):
        assert table.kept[start * 4 + end] == kept[start:end].max() - below[0][start]
        assert table.plain[start * 4 + end] == plain[start:end].max() - below[1][start]
    assert table.last_kept_S[1:].tolist() == kept.tolist()
    assert table.last_plain_S[1:].tolist() == plain.tolist()
    assert table.last_plain_S[0] == -np.inf


def test_only_where_gradients_are_reduced_the_top_layer_differs():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    single_R = model.holdings.table.single_R
    plain = WorkingSets(model.costs(2), single_R)
    assert plain.backward[0] is plain.backward[1]
    assert plain.reduced_R[0] == 0.0
    trained_R = np.arange(5) * 1000.0
    sharded = WorkingSets(model.costs(2), single_R, Sharding(kept=0.5, trained_R=trained_R))
    assert sharded.reduced_R[0] == 1000.0
    assert (sharded.made_S == plain.made_S / 2).all()
    # Of one layer both tables differ by what is reduced of the layer above.
    top, others = sharded.backward
    assert others.last_plain_S[1:] - top.last_plain_S[1:] == pytest.approx(trained_R[2:])


def test_gradients_of_layers_below_are_taken_off_as_often_as_is_said():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    sets = WorkingSets(model.costs(1), model.holdings.table.single_R)
    assert sets.ended(1) is sets.ended(1)
    for times in (0, 1, 2):
        less_S = times * sets.made_S[:-1]
        assert (sets.ended(times).last_plain_S[1:] == sets.saved_S[:-1] - less_S).all()


def test_variants_lie_one_after_another():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    costs, single_R = model.costs(2), model.holdings.table.single_R
    factors = np.array([1.0, 0.5])[:, None]
    changed = {name: factors * getattr(costs, name) for name in costs.__slots__ if name.endswith(("saved_R", "peak_R"))}
    both = WorkingSets(replace(costs, **changed), factors * single_R)
    for variant, factor in enumerate(factors[:, 0]):
        alone = WorkingSets(
            replace(costs, **{name: values[variant] for name, values in changed.items()}), factor * single_R
        )
        at = slice(variant * both.width, (variant + 1) * both.width)
        assert np.array_equal(both.saved_S[at], alone.saved_S)
        assert np.array_equal(both.made_S[at], alone.made_S)
        table = slice(variant * both.width**2, (variant + 1) * both.width**2)
        for mine, other in (
            (both.first[0], alone.first[0]),
            (both.ended(1), alone.ended(1)),
            (both.split, alone.split),
        ):
            assert np.array_equal(mine.kept[table], other.kept)
            assert np.array_equal(mine.last_plain_S[at], other.last_plain_S)
