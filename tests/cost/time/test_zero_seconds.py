import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.inputs.regions import StageRegions, covered
from lightning_mist.cost.memory.held_parameters import Holdings
from lightning_mist.cost.time.communication import unit_seconds
from lightning_mist.cost.time.offload_loads import unit_loads
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.cost.time.pass_seconds import Beside, RowSums, shared_seconds
from lightning_mist.cost.time.region_times import RegionSeconds, collective_seconds
from lightning_mist.schedule import ActionKind, ActionSeconds
from lightning_mist.schedule.lowering import are_again
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.stage_program import StageUnits, lines_of
from tests.specs import candidates_of, profile, slot_of, spec

NETWORK = spec(3)
COMPUTE = RegionSeconds(
    forward_R=np.array([1.0, 2.0, 3.0, 2.0, 1.0]),
    backward_R=np.array([2.0, 4.0, 6.0, 4.0, 2.0]),
    recompute_R=np.array([1.0, 2.0, 3.0, 2.0, 1.0]),
    source="measured",
)
UNITS = UNSHARD_R, REDUCE_FR = np.array([3.0, 5.0, 1.0, 4.0, 2.0]), np.array([[1.0, 3.0, 2.0, 6.0, 5.0]])
ONE_ROW_R = np.zeros(5, dtype=np.int64)
TURNS = dataclasses.replace(FREE, compute_network=1.0)


def asked(start, end, *, checkpointed=0, zero=3, interference=FREE, units=(*UNITS, ONE_ROW_R), one=False, **place):
    candidates, slot = candidates_of(start, end, checkpointed, zero), slot_of(data_parallel_degree=2, **place)
    unshard_R, reduce_JR, row_R = units
    sums = RowSums(unit_loads(COMPUTE, unshard_R, reduce_JR), interference, False)
    beside = Beside(unshard_R=unshard_R, reduce_JR=reduce_JR, row_R=row_R, is_one_unit=one, sums=sums)
    return beside, slot, StageRegions.of(NETWORK, candidates), candidates.zero_stage_K


def exposed(start, end, **given):
    found = shared_seconds(*asked(start, end, **given))
    return float(found["unshard_K"][0]), float(found["scatter_K"][0])


def again(start, end, **given):
    return float(shared_seconds(*asked(start, end, **given))["again_K"][0])


def listed(name, stages, microbatches, order, groups=None):
    """Seconds of all that the lists of a schedule unshard, by stage."""
    found = dict.fromkeys(range(stages), 0.0)
    for actions in generate(stages, microbatches, name, num_groups=groups):
        known = {
            action.stage: StageUnits(order=order, reduced=frozenset(order), sharded=frozenset(order))
            for action in actions
        }
        for action in (action for line in lines_of(actions, known) for action in line):
            if action.kind is ActionKind.UNSHARD:
                found[action.stage] += UNSHARD_R[action.unit]
    return found


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_a_whole_network_equals_walking_through_its_units(zero, checkpointed):
    unshard, reduce = UNSHARD_R if zero == 3 else np.zeros(5), REDUCE_FR[0]
    total = 0.0
    for unit in range(5):
        # The second unit comes in the first forward of a batch; the last two stay for the backward.
        total += max(COMPUTE.forward_R[unit], unshard[unit + 1] if unit < 4 else 0.0)
        again = COMPUTE.forward_R[unit] if 1 <= unit <= checkpointed else 0.0
        beside = (unshard[unit - 1] if 1 <= unit < 4 else 0.0) + (reduce[unit + 1] if unit < 4 else 0.0)
        total += max(COMPUTE.backward_R[unit] + again, beside)
    total += unshard[0] + reduce[0]
    computed = COMPUTE.forward_R.sum() + COMPUTE.backward_R.sum() + COMPUTE.forward_R[1 : 1 + checkpointed].sum()
    assert sum(exposed(0, 3, checkpointed=checkpointed, zero=zero)) == pytest.approx(total - computed)


def test_pieces_travel_in_one_message():
    table, hardware = Holdings(NETWORK).table, profile()
    asked = ("all_gather", table.used_R), ("reduce_scatter", table.reduced_JR)
    found = unit_seconds(hardware, table, 2, 1, even=True)
    for (operation, bytes_R), even_R in zip(asked, found, strict=True):
        assert (even_R == collective_seconds(hardware, operation, 2, 1, bytes_R)).all()


def test_where_channels_take_turns_beside_each_other_nothing_hides():
    unshard, reduce = exposed(0, 3, interference=TURNS)
    assert (unshard, reduce) == pytest.approx((2 * 15.0 - 4 - 2, 17.0))
    half = exposed(0, 3, interference=dataclasses.replace(FREE, compute_network=0.5))
    assert sum(exposed(0, 3)) < sum(half) < unshard + reduce


def test_on_a_cpu_all_that_is_moved_counts():
    assert exposed(1, 3, interference=None) == pytest.approx((2 * (1 + 4 + 2) - 4 - 2, 2 + 6 + 5))
    assert exposed(1, 3, zero=2, interference=None) == pytest.approx((0.0, 13.0))


@pytest.mark.parametrize("interference", [None, TURNS])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_a_batch_unshards_what_its_lists_unshard(name, microbatches, stages, interference):
    for (start, end), order in {(1, 2): (2,), (2, 3): (3, 4), (1, 3): (2, 3, 4), (0, 3): (0, 1, 2, 3, 4)}.items():
        for stage, seconds in listed(name, stages, microbatches, order).items():
            place = {"stage_index": stage, "num_stages": stages, "num_microbatches": microbatches, "schedule": name}
            unshard, _ = exposed(start, end, interference=interference, **place)
            assert microbatches * unshard == pytest.approx(seconds)


@pytest.mark.parametrize("stages", [1, 2])
def test_another_microbatch_of_1f1b_unshards_all_but_the_outermost_units_at_each_turn(stages):
    place = {"interference": None, "num_stages": stages}
    more = 6 * exposed(0, 3, num_microbatches=6, **place)[0] - 5 * exposed(0, 3, num_microbatches=5, **place)[0]
    lists = [listed("1f1b", stages, count, (0, 1, 2, 3, 4))[0] for count in (5, 6)]
    assert more == pytest.approx(2 * 15 - 3 - 5 - 4 - 2) == pytest.approx(lists[1] - lists[0])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_passes_unshard_what_their_lines_do(name):
    groups, chunks = 3, 2 if name == "interleaved-1f1b" else 1
    for order, (start, end) in {(2,): (1, 2), (3, 4): (2, 3), (2, 3, 4): (1, 3), (0, 1, 2, 3, 4): (0, 3)}.items():
        place = {"num_stages": groups * chunks, "num_microbatches": 6, "schedule": name}
        terms = shared_seconds(*asked(start, end, interference=None, **place))
        found = SimpleNamespace(**{name: float(value_K[0]) for name, value_K in terms.items()})
        seconds = ActionSeconds(
            forward=found.forward_unshard_K,
            backward=found.backward_unshard_K,
            first_forward=found.forward_unshard_K + found.begin_K,
            forward_again=found.forward_again_K,
            backward_again=found.backward_again_K,
        )
        passes = dict.fromkeys(range(groups * chunks), 0.0)
        for line in generate(groups * chunks, 6, name, num_groups=groups):
            for item, again in zip(line, are_again((item.stage, item.kind) for item in line), strict=True):
                passes[item.stage] += seconds.of(item.kind, is_first=item.microbatch == 0, is_again=again)
        wanted = listed(name, groups * chunks, 6, order, groups=groups)
        # Chunks of one or two units may stay while their like follows, which is not told apart.
        is_exact = chunks == 1 or len(order) > 2
        assert passes == pytest.approx(wanted) if is_exact else all(passes[stage] >= wanted[stage] for stage in wanted)


def test_chunks_of_a_group_are_never_charged_too_little():
    for order, (start, end) in {(2,): (1, 2), (3, 4): (2, 3), (0, 1, 2, 3, 4): (0, 3)}.items():
        for stage, seconds in listed("interleaved-1f1b", 4, 4, order, groups=2).items():
            place = {"stage_index": stage, "num_stages": 4, "num_microbatches": 4, "schedule": "interleaved-1f1b"}
            unshard, _ = exposed(start, end, interference=None, **place)
            assert seconds <= 4 * unshard + 1e-9 <= 4 * 2 * UNSHARD_R[list(order)].sum() + 1e-6


@pytest.mark.parametrize("interference", [FREE, None])
def test_one_unit_comes_once_per_batch(interference):
    unshard, _ = exposed(0, 3, interference=interference, one=True, num_microbatches=5)
    assert unshard == pytest.approx(15 / 5)


@pytest.mark.parametrize("interference", [FREE, TURNS, None])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3), (1, 2), (1, 3)])
def test_every_stage_behind_adds_the_same(start, end, name, interference):
    given = {"num_stages": 9, "num_microbatches": 5, "schedule": name, "interference": interference}
    for zero in (2, 3):
        more = again(start, end, zero=zero, **given)
        found = [exposed(start, end, zero=zero, behind=behind, **given)[0] for behind in range(7)]
        assert np.diff(found) == pytest.approx([more] * 4 + [0.0, 0.0])
        # One or two units never leave.
        assert (more > 0) == (zero == 3 and name != "gpipe" and end == 3)
    assert again(start, end, **given | {"num_microbatches": 1}) == 0.0


def test_many_candidates_are_what_each_is_alone():
    table = Holdings(spec(3, tied=True, parameter_bytes=40_000, edge_bytes=100_000)).table
    units = *unit_seconds(profile(link=1e8, latency=0.0), table, 2, 1), table.reduced_row_R
    every = [
        (start, end, kept, zero)
        for start in range(3)
        for end in range(start + 1, 4)
        for kept in range(end - start + 1)
        for zero in range(4)
    ]
    beside, slot, *_ = asked(0, 3, units=units, interference=TURNS, num_stages=3, num_microbatches=4)
    start_K, end_K, kept_K, zero_K = np.array(every).T
    candidates = StageCandidates(start_K=start_K, end_K=end_K, checkpointed_K=kept_K, zero_stage_K=zero_K)
    found = shared_seconds(beside, slot, StageRegions.of(NETWORK, candidates), zero_K)
    unshard_K, reduce_K = found["unshard_K"], found["scatter_K"]
    for index, (start, end, kept, zero) in enumerate(every):
        place = {"units": units, "interference": TURNS, "num_stages": 3, "num_microbatches": 4}
        alone = exposed(start, end, checkpointed=kept, zero=zero, **place)
        assert (unshard_K[index], reduce_K[index]) == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("interference", [FREE, None])
def test_without_sharding_nothing_is_added(interference):
    for zero in (0, 1):
        assert exposed(0, 3, zero=zero, interference=interference) == (0.0, 0.0)


def test_every_owner_of_a_unit_sends_a_message():
    table = Holdings(spec(2, parameter_bytes=40_000, edge_bytes=100_000, frozen=("wte.weight",))).table
    unshard_R, reduce_JR = unit_seconds(profile(link=1e8, latency=1e-4), table, 2, 1)
    assert unshard_R == pytest.approx([1e-4 + 1e-3, 2e-4 + 4.04e-4, 2e-4 + 4.04e-4, 1e-4 + 1e-3])
    # A frozen embedding has no gradient to reduce.
    assert reduce_JR[0] == pytest.approx([0.0, 2e-4 + 4.04e-4, 2e-4 + 4.04e-4, 1e-4 + 1e-3])


@pytest.mark.parametrize("interference", [None, TURNS])
def test_a_tied_gradient_is_reduced_once_in_a_stage(interference):
    table = Holdings(spec(3, tied=True, parameter_bytes=40_000, edge_bytes=100_000)).table
    units = *unit_seconds(profile(link=1e8, latency=0.0), table, 2, 1), table.reduced_row_R
    np.testing.assert_allclose(units[0], table.used_R / 1e8)

    def reduced(start, end):
        return 1e8 * exposed(start, end, zero=2, units=units, interference=interference)[1]

    for start, end in ((0, 3), (0, 1), (1, 3), (2, 3)):
        low, high = (int(values[0]) for values in covered(NETWORK, np.array([start]), np.array([end])))
        held = table.uses_PR[:, high] > table.uses_PR[:, low]
        assert reduced(start, end) == pytest.approx(table.trainable_P @ held)
    # The stage that begins with the embedding reduces it there, another one in its tail.
    assert len(table.reduced_JR) == 2
    assert table.trained_R.sum() - reduced(0, 3) == pytest.approx(table.trainable_P[(table.uses_PR[:, -1] > 1)].sum())
    assert table.trained_R.sum() > table.reduced_JR[0].sum()
