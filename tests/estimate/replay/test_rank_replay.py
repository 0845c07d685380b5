from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import stage_memory
from lightning_mist.cost.memory.memory_model import TERMS
from lightning_mist.errors import PlanError
from lightning_mist.estimate.allocator.allocator_data import AllocatorSettings
from lightning_mist.estimate.allocator.device_allocator import simulate_allocator
from lightning_mist.estimate.replay.rank_replay import replay_group, replay_plan, replay_rank
from lightning_mist.model import trace_model
from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.module_map import Exclusion
from tests import zoo
from tests.cost.events import WIDTH, with_events
from tests.integration.parity import make_plan
from tests.plans import plans
from tests.specs import spec
from tests.tiers import examples

TRAINED = 2 * 80_000 + 4 * 40_400
"""Bytes of the parameters of four layers, an embedding and a projection."""

ALWAYS = TRAINED + 2 * TRAINED + 64 + 4 * 16
"""With AdamW's state, buffers and a batch of four rows."""


MOVED = ("activations", "gradients", "optimizer", "parameters")
"""Kinds of state whose moves are replayed."""


@pytest.fixture(scope="module")
def network():
    return with_events(spec(4))


def check(replay):
    """Everything is allocated before it is freed, once."""
    alive_K = np.zeros(len(replay.bytes_K), dtype=int)
    for event in replay.events_E.tolist():
        alive_K[abs(event) - 1] += 1 if event > 0 else -1
        assert alive_K[abs(event) - 1] in (0, 1)


def test_two_microbatches_on_one_device_by_hand(network):
    (replay,) = replay_plan(network, make_plan([4], parts=2))
    # At the tail of the second backward: all that two rows keep, both losses, and the tail's gradients beside all.
    kept = 2 * (100 + WIDTH + 4 * 10 * WIDTH + 20 * WIDTH) + 2 * 4
    assert replay.phase == "0B1"
    assert replay.peak_bytes == ALWAYS + TRAINED + kept + 80_000 + 2 * WIDTH
    assert {name: size for name, size in replay.terms_at_peak() if size} == {
        "parameter_bytes": TRAINED,
        "buffer_bytes": 64,
        "optimizer_bytes": 2 * TRAINED,
        "batch_bytes": 64,
        "gradient_bytes": TRAINED + 80_000,
        "activation_bytes": kept,
        "working_bytes": 2 * WIDTH,
    }


def test_recomputed_layers_keep_what_they_are_given(network):
    (replay,) = replay_plan(network, make_plan([4], parts=2, checkpointed=4))
    kept = 2 * (100 + WIDTH + 4 * WIDTH + 20 * WIDTH) + 2 * 4
    at_tail = ALWAYS + TRAINED + kept + 80_000 + 2 * WIDTH
    # In the last layer: its input's gradient, its nine widths again, three of a temporary, its own gradients.
    at_layer = ALWAYS + TRAINED + kept - 2 * 20 * WIDTH + 2 * WIDTH + 2 * 12 * WIDTH + 40_400
    assert replay.peak_bytes == max(at_tail, at_layer)


def test_the_largest_at_the_peak_say_where_they_come_from(network):
    (replay,) = replay_plan(network, make_plan([4], parts=2))
    alive = replay.alive_at(replay.peak_event)
    assert sum(item.nbytes for item in alive) == replay.peak_bytes
    assert [item.nbytes for item in alive] == sorted((item.nbytes for item in alive), reverse=True)
    scores = next(item for item in alive if item.label.part == 4 and item.label.name == "activation")
    assert (scores.stage, scores.microbatch, scores.label.part, scores.label.term) == (0, 1, 4, "activation_bytes")
    assert scores.label.operator == "aten.mm.default"
    made = {item.label.name for item in alive if item.label.term == "gradient_bytes"}
    assert {"gradient of wte.weight", "gradient of head.weight", "gradient of blocks.2.bias"} <= made


def test_a_pipeline_holds_what_its_schedule_says(network):
    first, last = replay_plan(network, make_plan([2, 2], parts=4))
    assert (first.rank, last.rank) == (0, 1)
    # Where the first stage makes the embedding's gradient again, its own activations are gone: one other microbatch's.
    assert dict(first.terms_at_peak())["activation_bytes"] == 100 + WIDTH + 2 * 10 * WIDTH
    assert dict(first.terms_at_peak())["gradient_bytes"] == 80_000 + 2 * 40_400 + 80_000
    assert dict(last.terms_at_peak())["activation_bytes"] == 100 + 2 * 10 * WIDTH + 20 * WIDTH + 4 * 4


def test_what_is_received_lives_until_its_gradient_has_left(network):
    _, last = replay_plan(network, make_plan([2, 2], parts=4))
    received = [item for item in last.alive_at(last.peak_event) if item.label.name == "received activation"]
    assert {item.nbytes for item in received} == {WIDTH}
    assert all(item.stage == 1 and item.microbatch is not None for item in received)


@pytest.fixture(scope="module")
def traced():
    module, make_batch = zoo.make("nano")
    return trace_model(module, make_batch(8), call=zoo.step(module), optimizer=torch.optim.AdamW(module.parameters()))


@pytest.mark.combinations
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("checkpointed", [0, 1, 2])
def test_moved_activations_are_never_more_than_the_memory_model_says(traced, schedule, zero, checkpointed):
    plan = make_plan([2, 2], degrees=[2, 2], parts=4, rows=128, schedule=schedule, zero=zero, checkpointed=checkpointed)
    resident = [replay.peak_bytes for replay in replay_plan(traced, plan)]
    for ratio in (0.5, 1.0):
        moved = moving(plan, ratio)
        replays = replay_plan(traced, moved)
        for group, memory in enumerate(stage_memory(traced, moved)):
            check(replays[group])
            assert memory.peak_bytes >= 0.999 * replays[group].peak_bytes
            assert replays[group].peak_bytes <= resident[group]


def test_moved_activations_are_those_of_the_memory_model(traced):
    plan = moving(make_plan([1, 3], parts=8, rows=256), 0.5)
    for replay, memory in zip(replay_plan(traced, plan), stage_memory(traced, plan), strict=True):
        assert replay.peak_bytes == pytest.approx(memory.peak_bytes, rel=1e-3)


def moving(plan, activations=0.0, **ratios):
    offload = OffloadRatios(activations=activations, **ratios)
    return replace(plan, stages=tuple(replace(stage, offload=offload) for stage in plan.stages))


@pytest.mark.combinations
@pytest.mark.parametrize("kinds", [["optimizer"], ["parameters"], ["gradients"], MOVED[1:]], ids=" ".join)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_moved_state_is_never_more_than_the_memory_model_says(traced, kinds, schedule, zero):
    plan = make_plan([2, 2], degrees=[2, 2], parts=4, rows=16, schedule=schedule, zero=zero, checkpointed=1)
    for ratio in (0.3, 1.0):
        moved = moving(plan, **dict.fromkeys(kinds, ratio))
        for replay, memory in zip(replay_plan(traced, moved), stage_memory(traced, moved), strict=True):
            check(replay)
            assert memory.peak_bytes >= 0.995 * replay.peak_bytes


def test_updates_by_units_by_hand(network):
    plan = moving(make_plan([4], parts=2), optimizer=1.0)
    (moved,), (resident,) = replay_plan(network, plan), replay_plan(network, moving(plan))
    # Two buffers of a layer's state in place of the state of all, aligned: what is larger passes in parts.
    assert resident.peak_bytes - moved.peak_bytes == 2 * TRAINED - 2 * 80_896
    begins = {mark.action: mark.event for mark in moved.marks}
    gradients = [item for item in moved.alive_at(begins["0B0"] - 1) if item.label.term == "gradient_bytes"]
    # The step is left to the next batch, whose first forward has taken it.
    assert not gradients
    assert [item for item in moved.alive_at(moved.begin) if item.label.term == "gradient_bytes"]


def test_what_leaves_and_arrives_by_hand(network):
    plan = make_plan([4], parts=2, schedule="gpipe")
    (moved,) = replay_plan(network, moving(plan, 0.5))
    begins = {mark.action: mark.event for mark in moved.marks}
    # Between the two forwards half of what layers keep is away, what they are given too; the tail's input is there.
    alive = [item.nbytes for item in moved.alive_at(begins["0B0"] - 1) if item.microbatch == 0]
    assert alive == [40 * WIDTH, *[9 * WIDTH] * 4, 2 * WIDTH, *[WIDTH] * 4, 200, 4]
    assert moved.peak_bytes < replay_plan(network, plan)[0].peak_bytes


def test_a_ratio_of_which_no_tensor_has_an_element_moves_nothing(network):
    plan = make_plan([2, 2], parts=4)
    for found, wanted in zip(replay_plan(network, moving(plan, 1e-9)), replay_plan(network, plan), strict=True):
        assert np.array_equal(found.events_E, wanted.events_E)


def test_an_update_that_is_not_put_off_is_the_steps(network):
    seen = replace(network.module_map, exclusions=(Exclusion(feature="sharded_gradients", reason="a hook"),))
    plan = moving(make_plan([4], parts=2), optimizer=1.0, parameters=1.0)
    (put_off,), (at_once,) = replay_plan(network, plan), replay_plan(replace(network, module_map=seen), plan)
    kept = [item for item in at_once.alive_at(len(at_once.events_E) - 1) if item.label.term == "gradient_bytes"]
    assert sum(item.nbytes for item in kept) == TRAINED
    forward = next(mark.event for mark in at_once.marks if mark.action == "0F0" and mark.event >= at_once.begin)
    assert not [item for item in at_once.alive_at(forward) if item.label.term == "gradient_bytes"]
    ends = [replay.alive_at(len(replay.events_E) - 1) for replay in (put_off, at_once)]
    assert not [item for alive in ends for item in alive if item.label.term == "parameter_bytes"]
    check(at_once)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_parameters_in_host_memory_are_there_while_they_are_used(network, zero):
    plan = moving(make_plan([4], degrees=[2], parts=2, zero=zero), parameters=1.0)
    (moved,) = replay_plan(network, plan)
    begins = {mark.action: mark.event for mark in moved.marks}
    for action, most in (("start of step", 0), ("0F1", 80_000 + 40_400), ("STEP", 0)):
        alive = moved.alive_at(begins.get(action, begins.get(f"0{action}")) - 1)
        assert sum(item.nbytes for item in alive if item.label.term == "parameter_bytes") <= most
    term = TERMS.index("parameter_bytes")
    # Beside the unit that computes and the next one there is one that is updated or written back.
    assert 80_000 < moved.live_by_term()[term][1].max() <= 80_000 + 2 * 40_416


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_in_host_memory_leave_behind_their_backward(network, zero):
    plan = moving(make_plan([4], degrees=[2], parts=2, zero=zero), gradients=1.0)
    (moved,) = replay_plan(network, plan)
    begins = {mark.action: mark.event for mark in moved.marks}
    alive = {item.label.name for item in moved.alive_at(begins["0REDUCE"] - 1) if item.label.term == "gradient_bytes"}
    assert alive <= {"gradients of a unit on their way"}
    # Of a unit, and of the next one as soon as its backward runs, at most; beside the tail's as they are reduced.
    (terms,) = (bytes_E for name, bytes_E in moved.live_by_term() if name == "gradient_bytes")
    assert terms.max() <= 2 * 80_000 + 8
    # A number for each parameter travels with what ranks reduce.
    buffers = [item.nbytes for item in moved.alive_at(moved.begin) if item.label.name == "buffer of gradients"]
    assert buffers == [80_064] * 2


def test_of_gradients_that_stay_and_that_leave_each_goes_its_way(network):
    (some,), (none,) = (replay_plan(network, moving(make_plan([4], parts=2), gradients=g)) for g in (0.9, 0.0))
    begins = {mark.action: mark.event for mark in some.marks}
    names = {item.label.name for item in some.alive_at(begins["0STEP"] - 1) if item.label.term == "gradient_bytes"}
    # Of a layer's weight and bias the bias alone is little enough; head and tail are one parameter each.
    assert {name for name in names if "bias" in name} == set()
    assert {"gradient of wte.weight", "gradient of blocks.3.weight"} <= names
    check(some)
    check(none)


def test_distributed_data_parallel_has_its_buckets_all_the_time(network):
    plan = make_plan([4], degrees=[2])
    assert plan.is_plain
    (plain,), (ours,) = replay_plan(network, plan), replay_plan(network, plan, plain=False)
    buckets = [item for item in plain.alive_at(plain.begin) if item.label.term == "gradient_bytes"]
    assert sum(item.nbytes for item in buckets) == TRAINED
    forward = [mark.event for mark in ours.marks if mark.action == "0F0"][-1]
    assert not [item for item in ours.alive_at(forward - 1) if item.label.term == "gradient_bytes"]
    check(plain)
    check(ours)


def test_sharding_takes_away_what_it_says(network):
    peaks = [replay_plan(network, make_plan([4], degrees=[2], parts=2, zero=zero))[0] for zero in range(4)]
    states = [dict(item.terms_at_peak())["optimizer_bytes"] for item in peaks]
    assert states[0] == 2 * TRAINED
    assert set(states[1:]) == {TRAINED}
    assert [item.peak_bytes for item in peaks] == sorted((item.peak_bytes for item in peaks), reverse=True)
    assert dict(peaks[3].terms_at_peak())["parameter_bytes"] < TRAINED


def test_weights_that_wait_keep_what_their_gradients_are_made_of(network):
    plan = make_plan([2, 2], parts=4, schedule="zb-h1")
    first, last = replay_plan(network, plan)
    check(first)
    check(last)
    begins = {mark.action: mark.event for mark in first.marks if mark.event >= first.begin}
    # The first stage makes weights' gradients at once, the last one a microbatch later.
    before = first.alive_at(begins["0W0"] - 1)
    waiting = [item for item in before if item.microbatch == 0 and item.label.part in (0, 1)]
    assert sorted(item.nbytes for item in waiting) == [400, 400, *[3 * WIDTH] * 2, *[9 * WIDTH] * 2]
    behind = first.alive_at(begins["0RECV_F3"] - 1 if "0RECV_F3" in begins else begins["0F3"] - 1)
    weights = {item.label.name for item in behind if item.label.term == "gradient_bytes"}
    assert "gradient of blocks.1.weight" in weights
    begins = {mark.action: mark.event for mark in last.marks if mark.event >= last.begin}
    received = [item for item in last.alive_at(begins["1W1"] - 1) if item.label.name == "received activation"]
    # Nothing is made of what the layer was given: it goes with its gradient. The tail's input waits.
    assert 0 not in {item.microbatch for item in received}
    tail = [item for item in last.alive_at(begins["1W0"] - 1) if item.label.part == 3 and item.microbatch == 0]
    assert WIDTH in {item.nbytes for item in tail}


@settings(max_examples=examples(40))
@given(plan=plans(num_layers=4, max_devices=5, max_microbatches=12), data=st.data())
def test_every_step_ends_as_it_began(plan, data):
    if plan.global_batch_size % plan.world_size:
        return
    network, ratios = with_events(spec(4)), st.sampled_from([0.0, 0.3, 1.0])
    plan = moving(plan, **{kind: data.draw(ratios) for kind in MOVED})
    replay = replay_rank(network, plan, data.draw(st.integers(0, plan.world_size - 1)))
    check(replay)
    alive = replay.alive_at(len(replay.events_E) - 1)
    held = {item.label.term for item in alive} - {"gradient_bytes", "offload_bytes"}
    assert held <= {"parameter_bytes", "buffer_bytes", "optimizer_bytes", "batch_bytes", "activation_bytes"}
    # Of what microbatches allocated only losses stay.
    assert all(item.nbytes == 4 for item in alive if item.label.term == "activation_bytes")
    assert dict(replay.terms_at_peak()).keys() == set(TERMS)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_long_schedules_are_cut_short_without_a_difference(network, schedule, zero):
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    plan = make_plan([1, 1, 1, 1] if chunks > 1 else [2, 2], chunks=chunks, degrees=[2, 2], parts=8, zero=zero,
                     schedule=schedule, rows=16)  # fmt: skip
    for rank in range(plan.world_size):
        short, long = (replay_rank(network, plan, rank, shorten=shorten) for shorten in (True, False))
        assert len(short.events_E) < len(long.events_E)
        assert abs(short.peak_bytes - long.peak_bytes) <= 4 * plan.num_microbatches


def test_the_allocator_takes_the_events(network):
    replay = replay_group(network, make_plan([2, 2], parts=4), 0)
    result = simulate_allocator(replay.memory_events(), AllocatorSettings())
    assert result.peak_requested >= replay.peak_bytes


def test_terms_over_time_add_up(network):
    (replay,) = replay_plan(network, make_plan([4], parts=2))
    by_term = replay.live_by_term()
    assert [name for name, _ in by_term] == list(TERMS)
    assert (sum(bytes_E for _, bytes_E in by_term) == replay.live_E[replay.begin :]).all()


def test_a_network_without_events_cannot_be_replayed():
    with pytest.raises(PlanError, match=r"synthetic: the head has no list of allocations.*trace the module"):
        replay_plan(spec(4), make_plan([4]))
