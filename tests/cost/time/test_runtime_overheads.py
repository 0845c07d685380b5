import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.time.runtime_overheads import SPLIT_BACKWARD, overhead_seconds
from lightning_mist.hardware import StepOverheads
from tests.specs import candidates_of, cluster, profile, slot_of, spec, with_splits

OVERHEADS = StepOverheads(
    step_seconds=1.0,
    action_seconds=10.0,
    message_seconds=100.0,
    exchange_seconds=1000.0,
    stand_in_seconds=10000.0,
    split_operator_seconds=5.0,
    unit_seconds=7.0,
    recomputed_layer_seconds=0.25,
    deferred_operator_seconds=0.125,
)


def slot(stages=3, *, degree=1, tensor=1, schedule="1f1b"):
    shape = {"data_parallel_degree": degree, "tensor_parallel_degree": tensor, "replicas": degree}
    return slot_of(num_stages=stages, num_microbatches=4, rows=2, batch_rows=2, schedule=schedule, **shape)


def candidates(bounds, zero=0, checkpointed=0):
    return candidates_of(*zip(*bounds, strict=True), checkpointed, zero)


NETWORK = spec(6)
HEAD = NETWORK.head.forward_operators


def test_boundaries_post_messages_and_later_stages_run_the_head_on_stand_ins():
    stages = candidates([(0, 2), (2, 4), (4, 6)])
    found = overhead_seconds(OVERHEADS, slot(), stages, NETWORK)
    assert HEAD > 0
    assert found.forward_K.tolist() == [110, 10000 * HEAD + 210, 10000 * HEAD + 110]
    assert found.backward_K.tolist() == [110, 210, 110]
    assert found.once_K.tolist() == [1001] * 3


@pytest.mark.parametrize(("stages", "degree", "seconds"), [(1, 1, 1), (2, 1, 1001), (1, 2, 1001)])
def test_only_ranks_of_one_replica_exchange_batches(stages, degree, seconds):
    where = slot(stages, tensor=degree)
    found = overhead_seconds(OVERHEADS, where, candidates([(0, 6)]), NETWORK)
    assert found.once_K.tolist() == [seconds]
    assert found.forward_K.tolist() == [10]


def test_recomputed_layers_take_longer_in_backward():
    few, many = (
        overhead_seconds(OVERHEADS, slot(1), candidates([(0, 6)], checkpointed=count), NETWORK) for count in (0, 4)
    )
    assert many.backward_K[0] - few.backward_K[0] == 4 * 0.25
    assert many.forward_K.tolist() == few.forward_K.tolist()


def test_backwards_in_two_parts_take_longer_by_their_operators():
    stages = candidates([(0, 2), (2, 6)])
    one, two = (overhead_seconds(OVERHEADS, slot(2, schedule=name), stages, NETWORK) for name in ("1f1b", "zb-h1"))
    layer = NETWORK.layers[NETWORK.kinds[0]].backward_operators
    ends = [NETWORK.head.backward_operators, NETWORK.tail.backward_operators]
    wanted = [0.125 * (2 * layer + ends[0]), 0.125 * (4 * layer + ends[1])]
    assert two.backward_K - one.backward_K == pytest.approx(wanted)


def seconds_with(overheads, degree=1):
    machine = dataclasses.replace(profile(), overheads=overheads)
    model = StageCostModel(spec(3), machine, cluster())
    return model.seconds(slot(1, degree=degree), candidates([(0, 3)], zero=3 if degree > 1 else 0))


def test_every_unsharding_and_reduction_of_a_unit_takes_longer():
    plain, slow = (seconds_with(item, degree=2) for item in (StepOverheads(), OVERHEADS))
    units = (slow.scatter_K[0] - plain.scatter_K[0]) / OVERHEADS.unit_seconds
    assert units == pytest.approx(round(units))
    assert units >= 3
    # At every turn the two outermost units are there already; those of the first forward come once per batch.
    moves = 2 * units - 4 + 2 / slot(1).num_microbatches
    assert slow.unshard_K[0] - plain.unshard_K[0] == pytest.approx(moves * OVERHEADS.unit_seconds)


def test_steady_and_boundary_time_contain_them():
    plain, slow = (seconds_with(item) for item in (StepOverheads(), OVERHEADS))
    assert slow.steady_K[0] - plain.steady_K[0] == pytest.approx(20.0)
    assert slow.boundary_K[0] - plain.boundary_K[0] == pytest.approx(1.0)


def test_operators_on_shared_out_tensors_take_longer():
    network = with_splits(spec(3, measured=True), (2, False))
    before, after = (
        StageCostModel(network, dataclasses.replace(profile(), overheads=item), cluster()).region_seconds(2, 2)
        for item in (StepOverheads(), OVERHEADS)
    )
    operators = [network.head, *(network.layers[kind] for kind in network.kinds), network.tail]
    more = np.array([5.0 * item.forward_operators for item in operators])
    assert after.forward_R - before.forward_R == pytest.approx(more)
    assert after.backward_R - before.backward_R == pytest.approx(SPLIT_BACKWARD * more)
