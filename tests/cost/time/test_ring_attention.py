import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.cost.time.ring_attention import KEY_VALUE_STATES, ring_nodes, ring_seconds
from lightning_mist.errors import PlanError
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from tests.cost.inputs.test_context_parallel import sequences
from tests.specs import cluster, profile, spec

LENGTH, HIDDEN = 8, 1000


def attending(length=LENGTH):
    """Layers whose FLOPs are linear in the sequence but for attention, which is half of them at ``length`` tokens."""
    uses = sequences(4, length)

    share = (SEQUENCE / length + SEQUENCE**2 / length**2) / 2

    def part(item):
        grown = {
            name: tuple(dataclasses.replace(work, flops=work.flops * share) for work in getattr(item, name))
            for name in ("forward_work", "backward_work")
        }
        return dataclasses.replace(item, **grown)

    return dataclasses.replace(uses, layers=tuple(map(part, uses.layers)))


def slot(context=2, **changes):
    sizes = {"stage_index": 0, "num_stages": 1, "num_microbatches": 4, "data_parallel_degree": 1, "rows": 4}
    return StageSlot(**{**sizes, "batch_rows": 4, "context_parallel_degree": context, **changes})


def candidates(*, checkpointed=0, zero=0):
    return StageCandidates(
        start_K=np.array([0]),
        end_K=np.array([4]),
        checkpointed_K=np.array([checkpointed]),
        zero_stage_K=np.array([zero]),
    )


def model(uses=None, *, link=1e9, latency=1e-5, kind="cpu", devices=2, **changes):
    machine = dataclasses.replace(profile(link=link, latency=latency), **changes)
    return StageCostModel(uses or attending(), machine, cluster(devices, kind=kind))


def block(rows=4, tokens=LENGTH // 2):
    """Bytes of keys and values of a device's part of the sequence."""
    return KEY_VALUE_STATES * rows * tokens * HIDDEN


def test_on_a_cpu_keys_and_values_go_around_beside_nothing():
    step = 1e-5 + block() / 1e9
    found = model().seconds(slot(), candidates(checkpointed=3))
    # Once in a forward of two devices; again in a backward, and their gradients twice, home to where they belong.
    assert found.forward_ring_K[0] == pytest.approx(4 * step)
    assert found.ring_K[0] == pytest.approx((4 + 4 * 3 + 3) * step)
    assert found.steady_K[0] == pytest.approx(
        found.forward_K[0] + found.backward_K[0] + found.recompute_K[0] + found.ring_K[0]
    )
    four = model(devices=4).seconds(slot(4), candidates())
    step = 1e-5 + block(tokens=LENGTH // 4) / 1e9
    assert four.ring_K[0] == pytest.approx(4 * (3 + 3 + 4) * step)


def test_every_device_does_an_equal_part_of_everything():
    alone, shared = (model().seconds(slot(context), candidates(zero=0)) for context in (1, 2))
    assert alone.ring_K[0] == alone.forward_ring_K[0] == 0.0
    # As much as half of the rows with the whole of their sequence.
    region = model().region_seconds(2)
    assert shared.forward_K[0] == pytest.approx(region.forward_R.sum())
    plain = model().seconds(slot(1, data_parallel_degree=2), candidates())
    assert shared.update_K[0] == plain.update_K[0]


def test_on_a_device_attention_hides_the_ring():
    machine = model(link=1e12, latency=0.0, kind="cuda")
    assert machine.seconds(slot(), candidates()).ring_K[0] == 0.0
    # Of layers that take F, attention is half; beside half of it, one of two blocks, something travels.
    slow = model(link=1e5, latency=0.0, kind="cuda")
    region, step = slow.region_seconds(2), block() / 1e5
    found = ring_seconds(slow.profile, slow.cluster, slot(), slow.memory(slot()), region)
    assert found[0][1:-1] == pytest.approx(step - region.forward_R[1:-1] / 4)
    assert found[1][1:-1] == pytest.approx(3 * step - region.backward_R[1:-1] / 4)
    assert found[0][[0, -1]].tolist() == [0.0, 0.0]


def test_interference_slows_both():
    free, slowed = (
        model(link=1e8, kind="cuda", interference=dataclasses.replace(FREE, compute_network=share))
        for share in (0.0, 1.0)
    )
    assert slowed.seconds(slot(), candidates()).ring_K[0] > free.seconds(slot(), candidates()).ring_K[0]


def test_tensor_parallel_devices_have_a_part_of_the_heads():
    uses = attending()
    machine = model(uses)
    region, memory = machine.region_seconds(2), machine.memory(slot())
    shares = [
        ring_seconds(machine.profile, machine.cluster, slot(**place), memory, region)[0][1] - 1e-5
        for place in ({}, {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2, "sequence_parallel": True})
    ]
    assert shares[0] == pytest.approx(2 * shares[1])
    # What a sequence-parallel device hands on is its part of the sequence already.
    assert shares[2] == shares[0]


def test_rings_are_contiguous_if_nothing_else_is_known():
    machine = cluster(8, nodes=2)
    assert ring_nodes(machine, slot(4)) == 1
    assert ring_nodes(machine, slot(4, tensor_parallel_degree=2)) == 2


def test_gradients_are_averaged_over_the_ranks_of_a_ring_too():
    found = model().seconds(slot(), candidates())
    plain = model().seconds(slot(1, data_parallel_degree=2), candidates())
    assert found.reduce_K[0] == plain.reduce_K[0] > 0.0
    sharded = model().seconds(slot(), candidates(zero=3))
    assert sharded.unshard_K[0] > 0.0
    assert sharded.update_K[0] < found.update_K[0]


def test_a_network_without_a_sequence_is_refused():
    with pytest.raises(PlanError, match="synthetic was traced without a sequence dimension"):
        model(spec(4, measured=True)).seconds(slot(), candidates())


def test_symbols_are_those_of_the_network():
    assert {MICROBATCH, SEQUENCE} >= attending().layers[0].forward_flops.free_symbols
