import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageSlot
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.time.optimizer_step import ADDITION, OPERATORS_PER_PARAMETER, PASS, update_seconds
from tests.specs import ADAMW, cluster, profile, spec

RATE, LAUNCH = 1e9, 1e-6
HELD = 2 * 80_000 + 4 * 40_400
PARAMETERS = 10


def seconds(network=None, *, degree=1, zero=0, world=None, kind="cpu"):
    network = spec(4) if network is None else network
    slot = StageSlot(
        stage_index=0,
        num_stages=1,
        num_microbatches=4,
        data_parallel_degree=degree,
        rows=2,
        batch_rows=8 * degree // (world or degree),
    )
    candidates = StageCandidates(
        start_K=np.array([0]),
        end_K=np.array([4]),
        checkpointed_K=np.array([0]),
        zero_stage_K=np.array([zero]),
    )
    machine = profile(bytes_per_second=RATE), cluster(degree, kind=kind)
    return update_seconds(machine, network, slot, candidates, MemoryModel(network).holdings)


def moved(found):
    """Bytes that the update moves, without launching."""
    return (found.update_K[0] - PARAMETERS * OPERATORS_PER_PARAMETER * LAUNCH) * RATE


def test_a_lone_device_steps_and_multiplies_by_the_gradient_at_the_loss():
    assert moved(seconds()) == pytest.approx(9 * HELD + PASS * HELD)


def test_a_stage_of_one_device_scales_its_gradients_for_the_others():
    assert moved(seconds(world=2)) == pytest.approx(9 * HELD + 2 * PASS * HELD)


def test_buckets_are_filled_and_scaled_by_ranks_with_the_same_parameters():
    assert moved(seconds(degree=2)) == pytest.approx(9 * HELD + 3 * PASS * HELD)


def test_sharding_steps_what_is_owned_and_gives_it_out():
    launches = PARAMETERS * OPERATORS_PER_PARAMETER * LAUNCH
    shares = [seconds(degree=2, zero=zero).update_K[0] for zero in (0, 1, 2, 3)]
    owned = MemoryModel(spec(4)).holdings.shares(
        StageCandidates(
            start_K=np.array([0]), end_K=np.array([4]), checkpointed_K=np.array([0]), zero_stage_K=np.array([1])
        ),
        2,
    )
    mine = float(owned.trained_K[0])
    assert HELD / 2 <= mine < HELD
    stepped = 9 * mine + PASS * mine
    launched = launches * mine / HELD
    assert shares[1] == pytest.approx((stepped + 3 * PASS * HELD) / RATE + launched)
    assert shares[2] == pytest.approx((stepped + PASS * HELD) / RATE + launched)
    assert shares[3] == pytest.approx(stepped / RATE + launched)


def test_a_loss_scale_is_taken_out_in_a_pass_of_its_own():
    network = dataclasses.replace(spec(4), precision="16-mixed")
    assert moved(seconds(network)) - moved(seconds()) == pytest.approx(PASS * HELD)


def test_optimizers_that_step_all_parameters_together_launch_few_operators():
    together = spec(4, optimizer=dataclasses.replace(ADAMW, step_peak_bytes_per_largest=0.0))
    found = seconds(together).update_K[0]
    assert found == pytest.approx((9 + PASS) * HELD / RATE + OPERATORS_PER_PARAMETER * LAUNCH)
    # A device is launched ahead of, so that only the slower of both counts.
    assert seconds(together, kind="cuda").update_K[0] == pytest.approx((9 + PASS) * HELD / RATE)


def test_a_measured_step_counts_by_the_bytes_that_are_owned():
    measured = spec(4, optimizer=dataclasses.replace(ADAMW, step_seconds_per_parameter_byte=3e-8))
    assert seconds(measured, degree=2).update_K[0] == pytest.approx(3e-8 * HELD + 3 * PASS * HELD / RATE)


def test_gradients_are_added_up_where_they_stay():
    plain = seconds(degree=2)
    assert plain.accumulate_K[0] == pytest.approx(ADDITION * HELD / RATE)
    assert plain.pass_K[0] == 0.0
    reduced = seconds(degree=2, zero=2)
    assert HELD / 2 <= reduced.accumulate_K[0] * RATE / ADDITION < HELD
    # Into buckets, and scaled, instead of added to gradients; then the owner's addition.
    assert reduced.pass_K[0] == pytest.approx((2 * PASS - ADDITION) * HELD / RATE + reduced.accumulate_K[0])


def test_nothing_is_shared_out_by_one_device():
    alone, sharded = seconds(), seconds(zero=3)
    for name in ("update_K", "accumulate_K", "pass_K"):
        assert getattr(alone, name) == getattr(sharded, name)
