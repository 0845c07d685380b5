import numpy as np
import pytest

from lightning_mist.cost import plan_clock as clock
from lightning_mist.cost import step_seconds
from lightning_mist.cost.plan_clock import clock_floor, clock_seconds, rules_of, step_times, terms_of
from lightning_mist.cost.time import TOLD, StageSeconds
from lightning_mist.plan import Plan, StageMesh, StagePlan
from lightning_mist.schedule import StepRules
from tests.specs import cluster

NAMES = [name[:-2] for name in TOLD]
BESIDE = StepRules()


def stage(**seconds):
    assert set(seconds) <= set(NAMES)
    return {f"{name}_seconds": float(seconds.get(name, 0.0)) for name in NAMES}


def plan(schedule, groups, *, chunks=1, microbatches=4):
    stages = tuple(
        StagePlan(layers=(index, index + 1), mesh=StageMesh(devices=(index % groups,)), microbatch_size=1)
        for index in range(groups * chunks)
    )
    return Plan(global_batch_size=microbatches, num_microbatches=microbatches, stages=stages, schedule=schedule)


def clocked_seconds(plan, terms, rules=BESIDE):
    return step_times(plan, terms, rules).step_seconds


@pytest.mark.parametrize(("groups", "chunks", "microbatches"), [(2, 2, 4), (3, 2, 6), (2, 4, 8), (4, 2, 64)])
def test_interleaving_shortens_the_bubble(groups, chunks, microbatches):
    interleaved = plan("interleaved-1f1b", groups, chunks=chunks, microbatches=microbatches)
    each = [stage(forward=1, backward=2)] * (groups * chunks)
    found = clocked_seconds(interleaved, each)
    assert found == pytest.approx(3 * (chunks * microbatches + groups - 1))
    assert found < step_seconds([3 * chunks] * groups, [0] * groups, microbatches)


@pytest.mark.parametrize("microbatches", [4, 9, 200])
def test_zero_bubble_fills_the_bubble_with_weight_gradients(microbatches):
    each = [stage(forward=1, backward=2, weight=1)] * 4
    found = clocked_seconds(plan("zb-h1", 4, microbatches=microbatches), each)
    assert found == pytest.approx(3 * microbatches + 3 * (1 + 1 - 1))


def test_what_is_waited_for_is_part_of_what_waits():
    terms = {
        "forward_unshard": 1,
        "backward_unshard": 1,
        "scatter": 4,
        "recompute": 1,
        "ring": 3,
        "forward_ring": 1,
        "overhead": 2,
        "forward_overhead": 1,
    }
    plain, waiting = ([stage(forward=1, backward=2, weight=1, **more)] * 2 for more in ({}, terms))
    longer = [stage(forward=4, backward=11, weight=1)] * 2
    zero_bubble = plan("zb-h1", 2)
    assert clocked_seconds(zero_bubble, waiting) == clocked_seconds(zero_bubble, longer)
    assert clocked_seconds(zero_bubble, plain) < clocked_seconds(zero_bubble, longer)


def test_warming_up_and_cooling_down_take_what_their_passes_do():
    more = {"begin": 0.5, "forward_again": 0.125, "backward_again": 0.25}
    made = plan("1f1b", 1, microbatches=4)
    assert clocked_seconds(made, [stage(forward=1, backward=2, **more)]) == 12.5
    made = plan("gpipe", 1, microbatches=4)
    assert clocked_seconds(made, [stage(forward=1, backward=2, **more)]) == 12.5 + 3 * 0.375


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_transfers_show_as_far_as_nothing_is_computed_meanwhile(schedule):
    bare = [stage(forward=1, backward=2, weight=1)] * 2
    transfers = ("arrival", "return", "send", "send_back")
    moving = [{**item, **{f"{name}_seconds": 0.5 for name in transfers}} for item in bare]
    free = clocked_seconds(plan(schedule, 2, microbatches=8), bare)
    beside = clocked_seconds(plan(schedule, 2, microbatches=8), moving)
    within = clocked_seconds(plan(schedule, 2, microbatches=8), moving, StepRules(transfers="within"))
    assert free + 1 <= beside <= within <= free + 8 * 2 * 2 * 0.5


def test_what_sending_takes_shows_though_receivers_take_nothing():
    bare = [stage(forward=1, backward=2, weight=1)] * 2
    sending = [stage(forward=1, backward=2, weight=1, send=0.5), stage(forward=1, backward=2, weight=1, send_back=0.25)]
    free, sent = (step_times(plan("1f1b", 2), terms, StepRules(transfers="within")) for terms in (bare, sending))
    assert sent.step_seconds > free.step_seconds
    assert sent.spent[0].communication_seconds == pytest.approx(sent.step_seconds - free.step_seconds)
    beside = step_times(plan("1f1b", 2), sending, BESIDE)
    assert beside.step_seconds == free.step_seconds


def test_a_single_stage_takes_the_sum_of_everything():
    terms = stage(forward=1, backward=2, recompute=3, accumulate=0.5, reduce=4, update=5, gather=6, once=7)
    found = step_times(plan("1f1b", 1, microbatches=3), [terms], BESIDE)
    assert found.step_seconds == 3 * 6 - 0.5 + 4 + 5 + 6 + 7
    assert dict(found.spent[0].terms) == {
        "compute_seconds": 8.5,
        "recompute_seconds": 9.0,
        "communication_seconds": 10.0,
        "copies_seconds": 0.0,
        "optimizer_seconds": 5.0,
        "overhead_seconds": 7.0,
        "bubble_seconds": 0.0,
    }


def test_chunks_update_together():
    each = [stage(forward=1, backward=2, reduce=1, tied=2, update=3, gather=4)] * 4
    bare = [stage(forward=1, backward=2)] * 4
    interleaved = plan("interleaved-1f1b", 2, chunks=2)
    assert clocked_seconds(interleaved, each) - clocked_seconds(interleaved, bare) == pytest.approx(2 * (1 + 2 + 3 + 4))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)])
def test_stages_wait_for_the_updates_that_those_in_front_have_put_off(schedule, chunks):
    made = plan(schedule, 3, chunks=chunks, microbatches=6)
    each = [stage(forward=1, backward=2, weight=1, update=4)] * made.num_stages
    late = [item | {"deferred_seconds": 3.0} for item in each]
    longer = clocked_seconds(made, late) - clocked_seconds(made, each)
    # Each waits for the three seconds of all in front, of which the first group's were at the end before.
    assert longer == pytest.approx(2 * 3 * chunks)


def random_terms(rng, count):
    terms = []
    for _ in range(count):
        forward, weight, rest = rng.uniform(1, 3, 3)
        per_batch = {name: rng.uniform(0, 5) for name in ("reduce", "tied", "update", "gather", "once")}
        transfers = ("arrival", "return", "send", "send_back")
        beside = {name: rng.uniform(0, 0.5) for name in (*transfers, "unshard", "scatter", "overhead")}
        parts = {
            "exchange": 0.2 * forward,
            "recompute": forward / 2,
            "recompute_exchange": 0.1 * forward,
            "accumulate": 0.1 * weight,
            "copies": 0.5,
            "forward_copies": 0.25,
            "update_copies": 0.75,
            "deferred": rng.uniform(0, 0.75),
            "forward_overhead": beside["overhead"] / 3,
        }
        terms.append(stage(forward=forward, backward=weight + rest, weight=weight, **per_batch, **beside, **parts))
    return terms


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_lists_without_chunks_are_not_cut(monkeypatch, schedule):
    """Stages of which the slowest are not the last take longest until every ``P`` microbatches take as long."""
    stages = [stage(forward=1, backward=2 + at % 3, weight=1, arrival=0.3, **{"return": 0.2}) for at in range(6)]
    long = plan(schedule, 6, microbatches=500)
    found = clocked_seconds(long, stages)
    monkeypatch.setattr(clock, "LEAST", 10_000)
    assert found == clocked_seconds(long, stages)


CASES = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved-1f1b", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_cut_lists_take_as_long_as_whole_ones(monkeypatch, schedule, chunks, seed):
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(2, 4))
    stages = random_terms(rng, groups * chunks)
    rules = StepRules(transfers=("beside", "within")[seed % 2], update_after="all")
    long = plan(schedule, groups, chunks=chunks, microbatches=60 * groups)
    monkeypatch.setattr(clock, "UNCUT", 0)
    cut = clocked_seconds(long, stages, rules)
    monkeypatch.setattr(clock, "LEAST", 10_000)
    assert cut == pytest.approx(clocked_seconds(long, stages, rules), rel=5e-3)


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize("transfers", ["beside", "within"])
@pytest.mark.parametrize("microbatches", [6, 120])
def test_what_is_spent_adds_up_to_the_step_on_every_stage(schedule, chunks, transfers, microbatches):
    rng = np.random.default_rng(microbatches)
    terms = random_terms(rng, 3 * chunks)
    whole = plan(schedule, 3, chunks=chunks, microbatches=microbatches)
    found = step_times(whole, terms, StepRules(transfers=transfers, update_after="last"))
    assert len(found.spent) == whole.num_stages
    for index, spent in enumerate(found.spent):
        assert spent.step_seconds == pytest.approx(found.step_seconds)
        assert min(seconds for _, seconds in spent.terms) >= 0.0
        assert spent == found.spent[index % 3]
        mine = [terms[chunk] for chunk in whole.chunks(index % 3)]
        computed = sum(item["forward_seconds"] * 0.8 + item["backward_seconds"] for item in mine) * microbatches
        assert spent.compute_seconds == pytest.approx(computed - sum(item["accumulate_seconds"] for item in mine))
        assert spent.overhead_seconds > max(item["once_seconds"] for item in mine)
        assert spent.optimizer_seconds == pytest.approx(sum(item["update_seconds"] for item in mine))


def test_idle_stages_have_bubbles_and_transfers_are_no_bubbles():
    even = [stage(forward=1, backward=2)] * 4
    spent = step_times(plan("1f1b", 4, microbatches=8), even, BESIDE).spent
    assert {item.bubble_seconds for item in spent} == {9.0}
    moving = [{**item, "arrival_seconds": 0.25, "return_seconds": 0.25} for item in even]
    found = step_times(plan("1f1b", 4, microbatches=8), moving, BESIDE)
    assert {item.bubble_seconds for item in found.spent} == {9.0}
    assert {item.communication_seconds for item in found.spent} == {found.step_seconds - 33.0}


def test_what_rounding_leaves_is_no_transfer():
    terms = [stage(forward=0.1, backward=0.2, recompute=0.1, copies=0.7 / 3, update=0.3)]
    for count in range(1, 40):
        (spent,) = step_times(plan("1f1b", 1, microbatches=count), terms, BESIDE).spent
        assert spent.communication_seconds == 0.0


def test_machines_have_rules_of_their_own():
    assert rules_of(cluster(2), "32-true") == StepRules(transfers="within", update_after="all")
    assert rules_of(cluster(2, kind="cuda"), "bf16-mixed") == StepRules(transfers="beside", update_after="last")
    assert rules_of(cluster(2, kind="cuda"), "16-mixed") == StepRules(transfers="beside", update_after="all")


def test_terms_have_the_names_of_the_fields():
    values = {f"{name}_K": np.array([float(index)]) for index, name in enumerate(NAMES)}
    seconds = StageSeconds(**values, again_K=np.zeros(1))
    assert terms_of(seconds) == {f"{name}_seconds": float(index) for index, name in enumerate(NAMES)}


FLOORS = [
    *((name, groups, 1, count) for name in ("1f1b", "gpipe", "zb-h1") for groups, count in ((1, 3), (2, 2), (3, 12))),
    *(("interleaved-1f1b", groups, 2, count) for groups, count in ((2, 4), (3, 9))),
    *((name, 4, 1, 3) for name in ("1f1b", "zb-h1")),
    ("1f1b", 2, 1, 1),
]


@pytest.mark.parametrize("update_after", ["own", "last", "all"])
@pytest.mark.parametrize("transfers", ["beside", "within"])
@pytest.mark.parametrize("shape", FLOORS)
def test_no_step_takes_less_than_its_floor(shape, transfers, update_after):
    name, groups, chunks, count = shape
    random, rules = np.random.default_rng(7), StepRules(transfers=transfers, update_after=update_after)
    made = plan(name, groups, chunks=chunks, microbatches=count)
    for _ in range(20):
        terms = [dict(zip(stage(), random.exponential(size=len(NAMES)), strict=True)) for _ in made.stages]
        for term in terms:
            term["weight_seconds"] = 0.4 * term["backward_seconds"]
            term["accumulate_seconds"] = 0.2 * term["backward_seconds"]
            for part in ("ring", "copies", "overhead"):
                term[f"forward_{part}_seconds"] = 0.5 * term[f"{part}_seconds"]
        assert 0 < clock_floor(made, terms, rules) <= clock_seconds(made, terms, rules)


def test_the_floor_of_a_pipeline_of_like_stages_is_its_step():
    each = [stage(forward=1, backward=2, reduce=3, update=1)] * 4
    made = plan("1f1b", 4, microbatches=8)
    assert clock_floor(made, each, BESIDE) == pytest.approx(clock_seconds(made, each, BESIDE))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b"])
def test_where_lists_are_cut_the_floor_allows_for_it(name):
    chunks = 2 if name == "interleaved-1f1b" else 1
    made, rules = plan(name, 4, chunks=chunks, microbatches=200), StepRules(transfers="within")
    each = [stage(forward=1, backward=2, weight=1)] * (4 * chunks)
    floor, whole = clock_floor(made, each, rules), 3.0 * chunks * 200
    assert whole < clock_seconds(made, each, rules)
    assert 0.995 * whole < floor <= clock_seconds(made, each, rules)
