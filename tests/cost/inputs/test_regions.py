import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.inputs.regions import ParameterTable, compile_regions, covered, parameter_regions, regions_of
from tests.specs import spec


def test_tail_parameters_are_not_the_last_layers():
    network = spec(3)
    regions = dict(zip([p.name for p in network.parameters], parameter_regions(network), strict=True))
    assert regions["wte.weight"] == (0,)
    assert regions["blocks.0.weight"] == (1,)
    assert regions["blocks.2.bias"] == (3,)
    assert regions["head.weight"] == (4,)


def test_a_tied_parameter_has_both_regions_and_an_unused_one_goes_to_the_tail():
    network = spec(3, tied=True)
    extra = dataclasses.replace(network.parameters[0], name="unused")
    network = dataclasses.replace(network, parameters=(*network.parameters, extra))
    regions = dict(zip([p.name for p in network.parameters], parameter_regions(network), strict=True))
    assert regions["wte.weight"] == (0, 4)
    assert regions["unused"] == (4,)


def test_without_layers_everything_is_the_heads():
    network = spec(0)
    assert set(parameter_regions(network)) == {(0,)}
    assert [region.kind for region in regions_of(network)] == ["head", "tail"]


def test_expressions_are_evaluated_per_region():
    network = spec(4, kinds=(0, 1, 0, 1), widths=(1000, 3000))
    costs = compile_regions(network)(2)
    np.testing.assert_allclose(costs.saved_R, [2000, 20000, 60000, 20000, 60000, 8000])
    np.testing.assert_allclose(costs.checkpointed_saved_R[1:-1], [2000, 6000, 2000, 6000])
    np.testing.assert_allclose(costs.boundary_by_cut, [0, 2000, 6000, 2000, 0])
    np.testing.assert_allclose(costs.gradient_boundary_by_cut, costs.boundary_by_cut)
    assert costs.batch_bytes == 32


@pytest.mark.parametrize(("start", "end", "low", "high"), [(0, 2, 0, 3), (2, 4, 3, 5), (4, 6, 5, 8), (0, 6, 0, 8)])
def test_stages_cover_regions(start, end, low, high):
    found = covered(spec(6), np.array([start]), np.array([end]))
    assert (found[0][0], found[1][0]) == (low, high)


def test_the_table_counts_a_tied_parameter_in_no_single_region():
    table = ParameterTable.of(spec(2, parameter_bytes=40_000, edge_bytes=80_000, tied=True))
    np.testing.assert_allclose(table.single_R, [0, 40_400, 40_400, 0])
    assert table.bytes_P.sum() == 80_000 + 2 * 40_400


@pytest.mark.parametrize("frozen", [(), ("blocks.1.weight",)])
def test_a_table_where_less_is_trained_is_that_of_a_network_with_it_frozen(frozen):
    network = spec(3, parameter_bytes=40_000, edge_bytes=80_000, tied=True, frozen=frozen)
    chosen = np.array([index % 3 != 1 for index in range(len(network.parameters))])
    parameters = tuple(
        item if keeps else dataclasses.replace(item, trainable=False)
        for item, keeps in zip(network.parameters, chosen, strict=True)
    )
    found = ParameterTable.of(network).training(chosen)
    wanted = ParameterTable.of(dataclasses.replace(network, parameters=parameters))
    # Owners stay where they were.
    assert np.array_equal(found.is_first_P, ParameterTable.of(network).is_first_P)
    for name in set(ParameterTable.__slots__) - {"is_first_P"}:
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
