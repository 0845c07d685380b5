import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.time.optimizer_step import PASS
from lightning_mist.cost.time.region_times import compute_rate
from lightning_mist.plan.sharding import BUCKET_BYTES
from tests.specs import candidates_of as one
from tests.specs import cluster, profile, slot_of, spec, with_splits


def slot(index=0, stages=1, *, microbatches=4, degree=1, rows=2):
    place = {"stage_index": index, "num_stages": stages, "num_microbatches": microbatches, "rows": rows}
    return slot_of(**place, data_parallel_degree=degree, batch_rows=rows, replicas=degree)


def model(network=None, machine=None, **kwargs):
    network = spec(4, measured=True) if network is None else network
    return StageCostModel(network, profile() if machine is None else machine, cluster(**kwargs))


def test_layers_and_edges_add_up():
    seconds = model().seconds(slot(), one(0, 4))
    assert seconds.forward_K[0] == pytest.approx(2e-4 + 4 * 2e-3 + 6e-4)
    assert seconds.backward_K[0] == pytest.approx(3e-4 + 4 * 3e-3 + 9e-4)
    assert seconds.recompute_K[0] == seconds.transfer_K[0] == 0.0
    parts = [model().seconds(slot(index, 2), one(2 * index, 2 * index + 2)) for index in range(2)]
    assert sum(part.forward_K[0] for part in parts) == pytest.approx(seconds.forward_K[0])


def test_recomputation_is_one_more_forward_of_the_first_layers():
    network = spec(4, kinds=(0, 1, 0, 1), widths=(1000, 1000), measured=True)
    seconds = model(network).seconds(slot(1, 3), one(1, 4, checkpointed=2))
    assert seconds.recompute_K[0] == pytest.approx(4e-3 + 2e-3)


@pytest.mark.parametrize(("kind", "sides"), [("cuda", 1), ("cpu", 2)])
def test_transfers_are_what_a_stage_waits_for_and_what_its_cores_send(kind, sides):
    machine = profile(link=1e8, latency=1e-4)
    message = 1e-4 + 2 * 1000 / 1e8
    found = [
        model(machine=machine, kind=kind).seconds(slot(index, 3), one(start, end))
        for index, (start, end) in enumerate([(0, 1), (1, 3), (3, 4)])
    ]
    assert [item.transfer_K[0] for item in found] == pytest.approx([sides * n * message for n in (1, 2, 1)])
    assert [item.arrival_K[0] for item in found] == pytest.approx([0, message, message])
    assert [item.return_K[0] for item in found] == pytest.approx([message, message, 0])


def test_every_live_tensor_is_a_message():
    network = spec(4, measured=True)
    twice = dataclasses.replace(network, boundaries=tuple(cut * 2 for cut in network.boundaries))
    machine = profile(link=1e8, latency=1e-4)
    more = model(twice, machine).seconds(slot(0, 2), one(0, 2)).return_K[0]
    once = model(network, machine).seconds(slot(0, 2), one(0, 2)).return_K[0]
    assert more - once == pytest.approx(1e-4 + 2000 / 1e8, rel=1e-3)


def test_reduction_and_sharding():
    machine = profile(link=1e8, latency=1e-4)
    plain = model(machine=machine).seconds(slot(degree=2), one(0, 4))
    gradients = 2 * 80_000 + 4 * 40_400
    assert plain.reduce_K[0] == pytest.approx(1e-4 + gradients / 1e8)
    assert plain.gather_K[0] == 0.0
    sharded = model(machine=machine).seconds(slot(degree=2), one(0, 4, zero=1))
    # One bucket per owner at least.
    assert sharded.reduce_K[0] == pytest.approx(2e-4 + gradients / 1e8, rel=1e-6)
    assert sharded.gather_K[0] == sharded.reduce_K[0]
    assert sharded.update_K[0] < plain.update_K[0]
    alone = model(machine=machine).seconds(slot(), one(0, 4, zero=1))
    assert alone.reduce_K[0] == alone.gather_K[0] == 0.0


def test_sharded_gradients_are_reduced_in_every_microbatch_and_sharded_parameters_unsharded_but_at_turns():
    machine = profile(link=1e8, latency=0.0)
    gradients = 2 * 80_000 + 4 * 40_400
    two = model(machine=machine).seconds(slot(degree=2), one(0, 4, zero=2))
    assert (two.scatter_K[0], two.unshard_K[0], two.reduce_K[0]) == pytest.approx((gradients / 1e8, 0.0, 0.0))
    assert two.gather_K[0] == pytest.approx(gradients / 1e8)
    three = model(machine=machine).seconds(slot(degree=2), one(0, 4, zero=3))
    # At every turn the two outermost units stay; the first microbatch fetches those at the beginning.
    ends = 80_000 + 40_400
    given = 2 * (gradients - ends) + ends / slot(degree=2).num_microbatches
    assert (three.scatter_K[0], three.unshard_K[0]) == pytest.approx((gradients / 1e8, given / 1e8))
    assert three.gather_K[0] == three.reduce_K[0] == 0.0
    assert three.steady_K[0] - two.steady_K[0] == pytest.approx(given / 1e8)
    alone = model(machine=machine).seconds(slot(), one(0, 4, zero=3))
    assert alone.scatter_K[0] == alone.unshard_K[0] == 0.0


def test_on_a_device_the_reduction_hides_in_the_last_backward():
    network = spec(4, measured=True, edge_bytes=400 * 2**20)
    machine = profile(link=1e11, latency=1e-6)
    on_cpu = model(network, machine).seconds(slot(degree=2), one(0, 4)).reduce_K[0]
    hidden = model(network, machine, kind="cuda").seconds(slot(degree=2), one(0, 4)).reduce_K[0]
    gradients = 2 * 400 * 2**20 + 4 * 40_400
    assert hidden == pytest.approx(on_cpu * BUCKET_BYTES / gradients)
    slow = profile(link=1e9, latency=1e-6)
    backward = model(network, slow).seconds(slot(degree=2), one(0, 4)).backward_K[0]
    exposed = model(network, slow, kind="cuda").seconds(slot(degree=2), one(0, 4)).reduce_K[0]
    assert exposed == pytest.approx(model(network, slow).seconds(slot(degree=2), one(0, 4)).reduce_K[0] - backward)


def test_tied_gradients_travel_between_stages():
    network = spec(4, tied=True, measured=True)
    machine = profile(link=1e8, latency=1e-4)
    assert model(network, machine).seconds(slot(0, 2), one(0, 2)).tied_K[0] == pytest.approx(1e-4 + 80_000 / 1e8)
    assert model(network, machine).seconds(slot(1, 3), one(1, 3)).tied_K[0] == 0.0
    assert model(network, machine).seconds(slot(), one(0, 4)).tied_K[0] == 0.0


def test_steady_time_is_the_sum_of_its_terms():
    seconds = model().seconds(slot(0, 2, degree=2), one(0, 2, checkpointed=1))
    terms = seconds.forward_K + seconds.backward_K + seconds.recompute_K + seconds.transfer_K
    np.testing.assert_array_equal(seconds.steady_K, terms)


def split_slot(degree, *, sequence=False, stages=1):
    return dataclasses.replace(slot(0, stages), tensor_parallel_degree=degree, sequence_parallel=sequence)


def test_split_layers_shrink_as_their_work_does_and_exchange():
    machine = profile(link=1e8, latency=1e-4)
    network = with_splits(spec(4, measured=True), (2, False), (2, True))
    whole = model(network, machine).seconds(slot(), one(0, 4))
    half = model(network, machine).seconds(split_slot(2), one(0, 4))
    # Two messages with 2000 bytes of two rows each, per layer and for the tail.
    exchange = 2 * 1e-4 + 2000 * 2 / 1e8
    parts = [regions.forward_R for regions in (model(network, machine).region_seconds(2, degree) for degree in (1, 2))]
    # Half of the work, at the rate of smaller products; but just as many operators to launch.
    rates = [
        2e8 / share / compute_rate(machine, "float32", 2e8 / share / 2) + 60_000 / share / 1e9 + 20 * 1e-6
        for share in (1, 2)
    ]
    assert parts[1][1] == pytest.approx(parts[0][1] * rates[1] / rates[0] + exchange)
    assert half.forward_K[0] == pytest.approx(parts[1].sum())
    assert half.forward_K[0] < whole.forward_K[0]
    along = model(network, machine).seconds(split_slot(2, sequence=True), one(0, 4))
    assert along.forward_K[0] - half.forward_K[0] == pytest.approx(5 * exchange)


def test_a_recomputed_split_layer_exchanges_again():
    network = with_splits(spec(4, measured=True), (2, False))
    seconds = model(network)
    again = seconds.seconds(split_slot(2), one(0, 4, checkpointed=3)).recompute_K[0]
    assert again == pytest.approx(3 * seconds.region_seconds(2, 2).forward_R[1])


def test_sequence_parallel_stages_hand_on_parts():
    machine = profile(link=1e8, latency=0.0)
    network = with_splits(spec(4, measured=True), (2, False), (2, True))
    waits = [
        model(network, machine).seconds(split_slot(2, sequence=sequence, stages=2), one(0, 2)).transfer_K[0]
        for sequence in (False, True)
    ]
    assert waits[0] == pytest.approx(2 * waits[1])


def test_split_parameters_are_held_reduced_and_updated_in_part():
    network = with_splits(spec(4, measured=True), (2, False))
    whole, half = (model(network).memory(split_slot(degree)).holdings.of(one(0, 4)) for degree in (1, 2))
    biases = 4 * 400
    assert half.trained_K[0] == (whole.trained_K[0] - biases) / 2 + biases
    assert (
        model(network).seconds(split_slot(2), one(0, 4)).update_K[0]
        < model(network).seconds(slot(), one(0, 4)).update_K[0]
    )


def test_a_measured_update_replaces_what_follows_from_bytes():
    network = spec(4)
    rate = 1e-3
    timed = dataclasses.replace(
        network, optimizer=dataclasses.replace(network.optimizer, step_seconds_per_parameter_byte=rate)
    )
    held = model(network).memory(slot()).holdings.of(one(0, 4))
    passes = 2 * PASS * held.trained_K / profile().memory_bytes_per_second
    assert model(timed).seconds(slot(), one(0, 4)).update_K == pytest.approx(rate * held.trained_K + passes)
