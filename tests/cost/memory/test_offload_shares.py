import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates
from lightning_mist.cost.inputs.regions import ParameterTable, covered
from lightning_mist.cost.memory.held_parameters import PIECE_BYTES
from lightning_mist.cost.memory.offload_shares import offloaded_parameters
from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.sharding import assign_owners
from lightning_mist.schedule.flats import stage_flats
from lightning_mist.schedule.stage_units import offloaded_parameters as names_of
from tests.integration.parity import make_plan
from tests.specs import spec


def test_the_largest_parameters_that_fit_are_moved():
    uses = spec(1, parameter_bytes=400, edge_bytes=800)
    table = ParameterTable.of(uses)
    # wte, block's matrix and bias (4 bytes of 404), head.
    assert [item.bytes for item in uses.parameters] == [800, 400, 4, 800]
    assert offloaded_parameters(table, 0.0, trained=True).tolist() == [False] * 4
    assert offloaded_parameters(table, 0.5, trained=True).tolist() == [False, False, True, False]
    assert offloaded_parameters(table, 400 / 404, trained=True).tolist() == [False, True, False, False]
    assert offloaded_parameters(table, 1.0, trained=True).tolist() == [True] * 4


def test_frozen_parameters_have_no_gradients_to_move():
    table = ParameterTable.of(spec(1, frozen=("blocks.0.weight",)))
    assert offloaded_parameters(table, 1.0, trained=True).tolist() == [True, False, True, True]
    assert offloaded_parameters(table, 1.0, trained=False).tolist() == [True] * 4


def test_what_stays_and_what_is_moved_is_everything():
    model = MemoryModel(spec(4, widths=(1000,)))
    zeros = np.zeros(3, dtype=np.int64)
    stages = StageCandidates(start_K=zeros, end_K=zeros + 4, checkpointed_K=zeros, zero_stage_K=zeros)
    shares = model.states.of(stages, np.array([0.0, 0.5, 1.0]), 2, np.zeros(3, dtype=bool), trained=True)
    every = sum(item.bytes for item in model.spec.parameters if item.trainable)
    assert (shares.resident_K + shares.offloaded_K).tolist() == [every] * 3
    assert shares.offloaded_K[0] == shares.largest_K[0] == 0
    assert shares.offloaded_K[2] == every
    assert shares.largest_K[2] == shares.unit_K[0] == shares.unit_K[2]


def test_shares_of_all_ratios_are_those_of_each():
    model = MemoryModel(spec(4, kinds=(0, 1, 0, 1), widths=(1000, 1400), tied=True, frozen=("blocks.0.weight",)))
    stages = StageCandidates(
        start_K=np.array([0, 0, 2, 2, 0]),
        end_K=np.array([4, 2, 4, 4, 4]),
        checkpointed_K=np.zeros(5, dtype=int),
        zero_stage_K=np.zeros(5, dtype=int),
    )
    shards, values = np.array([True, False, True, False, False]), (0.0, 0.25, 0.5, 1.0)
    for trained in (False, True):
        found = model.states.of_ratios(stages, values, 3, shards, trained=trained)
        for place, ratio in enumerate(values):
            wanted = model.states.of(stages, np.full(5, ratio), 3, shards, trained=trained)
            for name in wanted.__slots__:
                assert getattr(found, name)[:, place].tolist() == getattr(wanted, name).tolist()
        some = found.take(np.array([1, 4]))
        assert some.offloaded_K.tolist() == [found.offloaded_K[0, 1], found.offloaded_K[1, 0]]


@pytest.mark.parametrize("ranks", [1, 2, 5, 40])
@pytest.mark.parametrize("frozen", [(), ("blocks.0.weight", "blocks.3.bias")])
def test_shares_by_brute_force(ranks, frozen):
    network = spec(4, kinds=(0, 1, 0, 1), parameter_bytes=4_000, widths=(1000, 1400), tied=True, frozen=frozen)
    model = MemoryModel(network)
    table, start, end = model.holdings.table, np.array([0, 1, 0]), np.array([4, 4, 2])
    zeros = np.zeros(3, dtype=int)
    stages = StageCandidates(start_K=start, end_K=end, checkpointed_K=zeros, zero_stage_K=zeros)
    used = np.diff(table.uses_PR, axis=1) > 0
    for trained in (False, True):
        found = model.states.of_ratios(stages, (0.0, 0.5), ranks, np.ones(3, dtype=bool), trained=trained)
        # Of parameters each begins at a multiple of 16 bytes where others have some.
        every = table.trainable_P if trained else table.bytes_P + (ranks > 1) * (-table.bytes_P % 16)
        is_kept = table.trainable_P == 0
        for at, (low, high) in enumerate(zip(*covered(network, start, end), strict=True)):
            held = np.flatnonzero(used[:, low:high].any(axis=1))
            # Trained parameters are dealt out first, and the others on top.
            owner, loads = np.zeros(len(held), dtype=int), [0] * ranks
            for chosen in (~is_kept[held], is_kept[held]):
                sizes = table.bytes_P[held][chosen].astype(int).tolist()
                owner[chosen] = assign_owners(sizes, ranks, loads)
                for size, rank in zip(sizes, owner[chosen], strict=True):
                    loads[rank] += size
            unit = used[held, low:high].argmax(axis=1)
            for place, ratio in enumerate((0.0, 0.5)):
                moved = offloaded_parameters(table, ratio, trained=trained)[held]
                cells = [(owner == rank) & (unit == at) for rank in range(ranks) for at in range(high - low)]
                wanted = (
                    max(every[held][(owner == rank) & ~moved].sum() for rank in range(ranks)),
                    max(every[held][(owner == rank) & moved].sum() for rank in range(ranks)),
                    max(every[held][cell & moved].sum() for cell in cells),
                    max(every[held][cell].sum() for cell in cells),
                )
                names = ("resident_K", "offloaded_K", "largest_K", "unit_K")
                assert tuple(getattr(found, name)[at, place] for name in names) == wanted


@pytest.mark.parametrize("ratio", [0.4, 1.0])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layers", [[4], [2, 2]])
def test_of_pieces_every_rank_moves_those_of_what_moves(layers, ranks, ratio):
    network = spec(4, parameter_bytes=51_200, edge_bytes=80_000, tied=True, frozen=("blocks.1.weight",)).evenly()
    offload = OffloadRatios(parameters=ratio, optimizer=ratio)
    plan = make_plan(layers, degrees=[ranks] * len(layers), zero=3, offload=offload)
    states, (begin, end) = MemoryModel(network).states, np.array(plan.bounds).T
    stages = StageCandidates(start_K=begin, end_K=end, checkpointed_K=0 * begin, zero_stage_K=0 * begin + 3)
    for trained in (False, True):
        found = states.of(stages, np.full(len(layers), ratio), ranks, stages.zero_stage_K > 0, trained=trained)
        for group in range(len(layers)):
            moved = names_of(plan, network.module_map, group, ratio, trained=trained)
            flats = [flat for flat in stage_flats(plan, network.module_map, group) if flat.is_trained or not trained]
            # Of what both stages hold one rank has everything.
            dealt, of_units, stay = 80_000 * (len(layers) > 1), dict[object, int](), 0
            for flat in flats:
                if flat.names[0] in moved:
                    of_units[flat.users] = of_units.get(flat.users, 0) + 4 * flat.piece
                else:
                    stay += 4 * flat.piece
            if "wte.weight" in moved:
                of_units["tied"] = dealt
            else:
                stay += dealt
            rounding = PIECE_BYTES * (len(flats) + 2)
            assert found.offloaded_K[group] == pytest.approx(sum(of_units.values()), abs=rounding)
            assert found.resident_K[group] == pytest.approx(stay, abs=rounding)
            assert found.largest_K[group] == pytest.approx(max(of_units.values()), abs=2 * PIECE_BYTES)
