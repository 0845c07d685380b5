import numpy as np
import pytest

from lightning_mist.cost.inputs.regions import ParameterTable
from lightning_mist.cost.memory.held_parameters import PIECE_BYTES, Owners, owners_of
from lightning_mist.plan.sharding import assign_owners
from lightning_mist.schedule.flats import stage_flats
from tests.integration.parity import make_plan
from tests.specs import spec

NETWORK = spec(3, parameter_bytes=40_000, edge_bytes=100_000, frozen=("blocks.1.weight",))

FROZEN = ("blocks.1.weight", "blocks.3.weight")


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


@pytest.mark.parametrize("loads", [(), (5, 0, 3)])
def test_owners_are_those_of_the_runtime(loads):
    for sizes in ([], [4], [3, 3, 8, 1, 8, 8]):
        for ranks in (1, 3):
            some = loads if ranks == 3 else ()
            assert owners_of(np.array(sizes, dtype=float), ranks, some).tolist() == list(
                assign_owners(sizes, ranks, some)
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 20])
def test_what_others_own_by_brute_force(ranks):
    network = spec(5, kinds=(0, 1, 0, 1, 1), parameter_bytes=5_000, widths=(1000, 1400), tied=True, frozen=FROZEN)
    table = ParameterTable.of(network)
    used, padded = np.diff(table.uses_PR, axis=1) > 0, np.ceil(table.bytes_P / 16) * 16
    for low, high in ((0, 7), (0, 3), (2, 5), (3, 7), (2, 3)):
        found = owners(network).of(low, high, ranks)
        held = table.uses_PR[:, high] > table.uses_PR[:, low]
        trained = table.trainable_P > 0
        owner = np.full(len(held), -1)
        owner[held & trained] = assign_owners(table.dealt_P[held & trained].astype(int).tolist(), ranks)
        loads = [int(table.dealt_P[owner == rank].sum()) for rank in range(ranks)]
        owner[held & ~trained] = assign_owners(table.dealt_P[held & ~trained].astype(int).tolist(), ranks, loads)
        assert found.trained == max(table.trainable_P[owner == rank].sum() for rank in range(ranks))
        assert found.every == max(padded[owner == rank].sum() for rank in range(ranks))
        for away, step in ((found.forward, 1), (found.backward, -1)):
            inside = [at for at in range(low, high) if low <= at + step < high]
            lacks = {
                at: max(
                    padded[(used[:, at] | used[:, at + step]) & held & (owner != rank)].sum() for rank in range(ranks)
                )
                for at in inside
            }
            layers = [lacks[at] for at in inside if at not in (0, 1, 6)]
            assert away.layers >= max(layers, default=0)
            if low == 0 and 0 in lacks:
                assert away.head == lacks[0]
            if low == 0 and high > 3 and 1 in lacks:
                assert away.first == lacks[1]
            if high == 7 and 6 in lacks:
                assert away.tail == lacks[6]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("layers", [[5], [2, 3]])
@pytest.mark.parametrize("tied", [False, True])
def test_even_pieces_are_those_of_the_layout(tied, layers, ranks, zero):
    network = spec(5, kinds=(0, 1, 0, 1, 1), parameter_bytes=51_200, widths=(1000, 1400), tied=tied, frozen=FROZEN)
    plan = make_plan(layers, degrees=[ranks] * len(layers), parts=2, zero=zero)
    for group, (first, end) in enumerate(plan.bounds):
        low, high = first + (first > 0), end + 1 + (end == 5)
        found = owners(network, is_even=True).of(low, high, ranks)
        flats = stage_flats(plan, network.evenly().module_map, group)
        # Of what both stages hold one rank has everything.
        dealt = 80_000 if tied and len(layers) > 1 else 0
        for shares, pieces in (
            (found.trained, [4 * flat.piece for flat in flats if flat.is_trained]),
            (found.every, [4 * flat.piece for flat in flats]),
        ):
            if zero == 3 or shares == found.trained:
                assert sum(pieces) + dealt <= shares + PIECE_BYTES * len(pieces)
                assert shares <= sum(pieces) + dealt + PIECE_BYTES * (high - low)


def test_nobody_owns_what_ranks_have_pieces_of():
    table, used_PR = ParameterTable.of(NETWORK), np.diff(ParameterTable.of(NETWORK).uses_PR, axis=1) > 0
    found, dealt = (owners(is_even=even).of(0, 5, 2) for even in (True, False))
    whole = [float(table.bytes_P[used_PR[:, r] | used_PR[:, r + 1]].sum()) for r in range(4)]
    assert (found.forward.head, found.forward.first, found.backward.tail) == (whole[0], whole[1], whole[3])
    assert dealt.backward.tail < found.backward.tail


def test_chunks_of_a_group_have_pieces_of_what_only_they_hold():
    network = spec(4, parameter_bytes=51_200, tied=True)
    known = owners(network, is_even=True)
    both = known.together([(0, 2), (4, 6)], 2)
    assert both.trained == pytest.approx((80_000 + 2 * 51_712) / 2, abs=4 * PIECE_BYTES)
    one = known.together([(0, 2), (3, 4)], 2)
    assert one.trained == pytest.approx(80_000 + 2 * 51_712 / 2, abs=4 * PIECE_BYTES)
