import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.channels import FREE
from lightning_mist.cost.held import Holdings
from lightning_mist.cost.regions import covered
from lightning_mist.cost.shards import UnitSeconds, exposed_seconds, unit_seconds
from lightning_mist.cost.time import RegionSeconds
from tests.specs import profile, spec

NETWORK = spec(3)
COMPUTE = RegionSeconds(
    forward_R=np.array([1.0, 2.0, 3.0, 2.0, 1.0]), backward_R=np.array([2.0, 4.0, 6.0, 4.0, 2.0]), source="measured"
)
UNITS = UnitSeconds(unshard_R=np.array([3.0, 5.0, 1.0, 4.0, 2.0]), reduce_R=np.array([1.0, 3.0, 2.0, 6.0, 5.0]))


def exposed(start, end, *, checkpointed=0, zero=3, interference=FREE):
    candidates = StageCandidates(
        start_K=np.array([start]),
        end_K=np.array([end]),
        checkpointed_K=np.array([checkpointed]),
        zero_stage_K=np.array([zero]),
    )
    low_K, high_K = covered(NETWORK, candidates.start_K, candidates.end_K)
    unshard_K, reduce_K = exposed_seconds(
        COMPUTE, UNITS, candidates, low_K, high_K, interference=interference, across_nodes=False
    )
    return float(unshard_K[0]), float(reduce_K[0])


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_a_whole_network_equals_walking_through_its_units(zero, checkpointed):
    unshard = UNITS.unshard_R if zero == 3 else np.zeros(5)
    forward, backward = 0.0, 0.0
    for unit in range(5):
        following = unshard[unit + 1] if unit < 4 else 0.0
        forward += max(COMPUTE.forward_R[unit], following)
        again = COMPUTE.forward_R[unit] if 1 <= unit <= checkpointed else 0.0
        beside = (unshard[unit - 1] if unit else 0.0) + (UNITS.reduce_R[unit + 1] if unit < 4 else 0.0)
        backward += max(COMPUTE.backward_R[unit] + again, beside)
    forward += unshard[0]
    backward += unshard[4] + UNITS.reduce_R[0]
    computed = COMPUTE.forward_R.sum() * 1 + COMPUTE.backward_R.sum() + COMPUTE.forward_R[1 : 1 + checkpointed].sum()
    assert sum(exposed(0, 3, checkpointed=checkpointed, zero=zero)) == pytest.approx(forward + backward - computed)


def test_where_channels_take_turns_beside_each_other_nothing_hides():
    turns = dataclasses.replace(FREE, compute_network=1.0)
    # Both ends count a unit beyond the stage too, which is then not free.
    unshard, reduce = exposed(0, 3, interference=turns)
    assert (unshard, reduce) == pytest.approx((2 * 15.0, 17.0))
    half = exposed(0, 3, interference=dataclasses.replace(FREE, compute_network=0.5))
    assert sum(exposed(0, 3)) < sum(half) < unshard + reduce


def test_on_a_cpu_all_of_it_counts():
    assert exposed(1, 3, interference=None) == (2 * (1 + 4 + 2), 2 + 6 + 5)
    assert exposed(1, 3, zero=2, interference=None) == (0.0, 13.0)


@pytest.mark.parametrize("interference", [FREE, None])
def test_without_sharding_nothing_is_added(interference):
    for zero in (0, 1):
        assert exposed(0, 3, zero=zero, interference=interference) == (0.0, 0.0)


def test_every_owner_of_a_unit_sends_a_message():
    table = Holdings(spec(2, parameter_bytes=40_000, edge_bytes=100_000, frozen=("wte.weight",))).table
    seconds = unit_seconds(profile(link=1e8, latency=1e-4), table, 2, 1)
    assert seconds.unshard_R == pytest.approx([1e-4 + 1e-3, 2e-4 + 4.04e-4, 2e-4 + 4.04e-4, 1e-4 + 1e-3])
    # A frozen embedding has no gradient to reduce.
    assert seconds.reduce_R == pytest.approx([0.0, 2e-4 + 4.04e-4, 2e-4 + 4.04e-4, 1e-4 + 1e-3])
