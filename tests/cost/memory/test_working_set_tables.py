import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost.memory.memory_model import MemoryModel
from lightning_mist.cost.memory.working_set_tables import RangeTable, Sharding, WorkingSets, run_levels, run_maxima
from tests.specs import spec


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 80])
def test_two_entries_of_a_table_give_the_maximum_of_any_run(count):
    values = np.random.default_rng(count).normal(size=count)
    table, (level_B, covered_B) = run_maxima(values), run_levels(count)
    for start, end in itertools.combinations_with_replacement(range(count + 1), 2):
        row, last = level_B[end - start], end - covered_B[end - start]
        assert max(table[row, start], table[row, last]) == max(values[start:end], default=-np.inf)
        assert start <= last


def test_tables_of_several_rows_are_those_of_each():
    values = np.random.default_rng(0).normal(size=(2, 3, 5))
    table = run_maxima(values)
    for at in np.ndindex(2, 3):
        assert np.array_equal(table[(slice(None), *at)], run_maxima(values[at]))


def test_places_in_a_table_are_of_a_run_in_its_variant():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    costs, single_R = model.costs(2), model.holdings.table.single_R
    rows = np.ones((2, 1))
    saved = {"saved_R": rows * costs.saved_R, "checkpointed_saved_R": rows * costs.checkpointed_saved_R}
    sets = WorkingSets(replace(costs, **saved), rows * single_R)
    kept, plain = np.array([[3.0, -1.0, 4.0], [7.0, 6.0, 5.0]]), np.array([[2.0, 9.0, 5.0], [0.0, 1.0, 8.0]])
    table = RangeTable.of(kept, plain)
    for variant, (start, end) in itertools.product(range(2), itertools.combinations_with_replacement(range(4), 2)):
        for values, recomputed in ((kept[variant], True), (plain[variant], False)):
            begin, count = np.array([variant * sets.width + start]), np.array([end - start])
            one, other = sets.places(begin, count, recomputed=recomputed)
            assert max(table.flat[one], table.flat[other]) == values[start:end].max(initial=-np.inf)
            last = sets.last_place(np.array([variant * sets.width + end]), recomputed=recomputed)
            assert table.flat[last] == (values[end - 1] if end else -np.inf)


def _last(sets, table):
    """The value of the last layer before each position, plain."""
    return table.flat[sets.last_place(np.arange(len(sets.saved_B)), recomputed=False)]


def test_only_where_gradients_are_reduced_the_top_layer_differs():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    single_R = model.holdings.table.single_R
    plain = WorkingSets(model.costs(2), single_R)
    assert plain.backward[0] is plain.backward[1]
    assert plain.reduced_R[0] == 0.0
    trained_R = np.arange(5) * 1000.0
    sharded = WorkingSets(model.costs(2), single_R, Sharding(gradient_share=0.5, trained_R=trained_R))
    assert sharded.reduced_R[0] == 1000.0
    assert (sharded.made_B == plain.made_B / 2).all()
    # Of one layer both tables differ by what is reduced of the layer above.
    top, others = sharded.backward
    assert _last(sharded, others)[1:] - _last(sharded, top)[1:] == pytest.approx(trained_R[2:])


def test_gradients_of_layers_below_are_taken_off_as_often_as_is_said():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    sets = WorkingSets(model.costs(1), model.holdings.table.single_R)
    assert sets.ended(1) is sets.ended(1)
    for times in (0, 1, 2):
        less_B = times * sets.made_B[:-1]
        assert (_last(sets, sets.ended(times))[1:] == sets.saved_B[:-1] - less_B).all()


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
        assert np.array_equal(both.saved_B[at], alone.saved_B)
        assert np.array_equal(both.made_B[at], alone.made_B)
        for mine, other in (
            (both.first[0], alone.first[0]),
            (both.ended(1), alone.ended(1)),
            (both.split, alone.split),
        ):
            of_both = mine.flat.reshape(-1, 2, 2, both.width)[:, :, variant]
            assert np.array_equal(of_both, other.flat.reshape(-1, 2, both.width))
