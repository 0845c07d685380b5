import numpy as np
import pytest

from lightning_mist.cost.ownership import Owners
from lightning_mist.cost.regions import ParameterTable
from lightning_mist.plan.sharding import assign_owners
from tests.specs import spec

NETWORK = spec(3, parameter_bytes=40_000, edge_bytes=100_000, frozen=("blocks.1.weight",))


def owners(network=NETWORK, **options):
    return Owners(ParameterTable.of(network), is_one_unit=False, **options)


def by_hand(ranks):
    """Trained and all bytes of every rank: frozen parameters come on top."""
    trained = [100_000, 40_000, 400, 400, 40_000, 400, 100_000]
    loads = [0] * ranks
    for owner, size in zip(assign_owners(trained, ranks), trained, strict=True):
        loads[owner] += size
    before = list(loads)
    loads[assign_owners([40_000], ranks, loads)[0]] += 40_000
    return max(before), max(loads)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_trained_parameters_first_then_frozen_ones(ranks):
    found = owners().of(0, 5, ranks)
    assert (found.trained, found.every) == by_hand(ranks)


def test_parameters_begin_at_multiples_of_sixteen_bytes():
    network = spec(1, parameter_bytes=2_000, edge_bytes=1_000)  # a bias of 20 bytes, edges of 1000
    found = owners(network).of(0, 3, 1)
    assert (found.trained, found.every) == (4_020, 2_000 + 32 + 2 * 1008)


def test_stages_of_equal_layers_are_worked_out_once():
    network = spec(6)
    known = owners(network)
    assert known.of(2, 4, 2) is known.of(3, 5, 2)
    assert known.of(1, 3, 2) is not known.of(0, 2, 2)


def test_what_a_device_lacks_is_never_less_than_by_hand():
    table = ParameterTable.of(NETWORK)
    found, used_PR = owners().of(0, 5, 2), np.diff(table.uses_PR, axis=1) > 0
    trained = table.trainable_P > 0
    owner = np.zeros(len(trained), dtype=int)
    owner[trained] = assign_owners(table.bytes_P[trained].astype(int).tolist(), 2)
    loads = [int(table.bytes_P[trained & (owner == rank)].sum()) for rank in range(2)]
    owner[~trained] = assign_owners([40_000], 2, loads)
    for rank in range(2):
        lacks = [float(table.bytes_P[(used_PR[:, r] | used_PR[:, r + 1]) & (owner != rank)].sum()) for r in range(4)]
        assert found.forward.head >= lacks[0]
        assert found.forward.first >= lacks[1]
        assert found.forward.layers >= max(lacks[2], lacks[3])
        assert found.backward.layers >= max(lacks[1], lacks[2])
        assert found.backward.tail >= lacks[3]
