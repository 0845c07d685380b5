import numpy as np

from lightning_mist.cost import StageCandidates
from lightning_mist.cost.inputs.arrays import prefix_sums
from lightning_mist.cost.time.region_sums import RegionSums
from lightning_mist.cost.time.region_times import RegionSeconds


def test_prefix_sums_count_what_lies_before():
    assert prefix_sums(np.array([2.0, 3.0, 5.0])).tolist() == [0.0, 2.0, 5.0, 10.0]
    assert prefix_sums(np.array([])).tolist() == [0.0]


def test_sums_of_regions():
    forward, backward, share = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 7.0]), np.array([0.0, 0.5, 1.0])
    compute = RegionSeconds(forward_R=forward, backward_R=backward, source="rates", exchange=(forward / 2, backward))
    sums = RegionSums.of(compute, share)
    assert (sums.forward[-1], sums.backward[2] - sums.backward[1], sums.weight[-1]) == (7.0, 5.0, 9.5)
    # The only layer is region 1, between the head and the tail.
    some = StageCandidates(
        start_K=np.array([0, 0]), end_K=np.array([1, 1]), checkpointed_K=np.array([0, 1]), zero_stage_K=np.array([0, 0])
    )
    found = sums.exchanged(some, np.array([0, 0]), np.array([3, 3]))
    assert [part.tolist() for part in found] == [[3.5, 3.5], [15.0, 15.0], [0.0, 1.0]]
    alone = RegionSums.of(RegionSeconds(forward_R=forward, backward_R=backward, source="rates"), share)
    assert [part.tolist() for part in alone.exchanged(some, np.zeros(2, int), np.full(2, 3))] == [[0.0, 0.0]] * 3
