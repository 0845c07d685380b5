import dataclasses

import pytest

from lightning_mist.cost import MemoryModel, StageCostModel
from lightning_mist.cost.inputs import key_value_bytes
from lightning_mist.cost.inputs.regions import KEY_VALUE_STATES
from lightning_mist.cost.time.communication import context_nodes, context_seconds
from lightning_mist.errors import PlanError
from lightning_mist.model.spec.model_spec import OperatorCost
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE
from lightning_mist.plan.tensor_split import stripes_of
from tests.cost.inputs.test_context_parallel import sequences
from tests.specs import candidates_of, cluster, profile, slot_of, spec

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
    return slot_of(**{"num_microbatches": 4, "rows": 4, "batch_rows": 4, "context_parallel_degree": context, **changes})


def candidates(*, checkpointed=0, zero=0):
    return candidates_of(0, 4, checkpointed, zero)


def model(uses=None, *, link=1e9, latency=1e-5, kind="cpu", devices=2, **changes):
    machine = dataclasses.replace(profile(link=link, latency=latency), **changes)
    return StageCostModel(uses or attending(), machine, cluster(devices, kind=kind))


def keys(rows=4, tokens=LENGTH):
    """Bytes of keys and values of all tokens, which are taken for two hidden states."""
    return KEY_VALUE_STATES * rows * tokens * HIDDEN


def fused(kind="causal_attention", heads=4, shared=2):
    """Layers of 32-bit fused attention alone, ``shared`` heads of keys for ``heads`` of queries of 8 numbers each."""
    uses = sequences(4, LENGTH)
    queries = heads * 8 * MICROBATCH * SEQUENCE

    def part(item):
        work = OperatorCost(
            kind=kind,
            flops=4 * queries * SEQUENCE,
            moved_bytes=4 * (2 * queries + 2 * queries * shared / heads),
            calls=1,
        )
        return dataclasses.replace(item, forward_work=(work,), backward_work=(work,))

    return dataclasses.replace(uses, layers=tuple(map(part, uses.layers)))


def test_keys_and_values_are_gathered_and_their_gradients_scattered():
    step = 2 * 1e-5 + keys() / 1e9
    found = model().seconds(slot(), candidates(checkpointed=3))
    head = model().region_seconds(2)
    # Every layer, recomputed ones again; the head is computed whole by both.
    assert found.forward_ring_K[0] == pytest.approx(4 * step + head.forward_R[0])
    assert found.ring_K[0] == pytest.approx((4 + 4 + 3) * step + head.forward_R[0] + head.backward_R[0])
    assert found.steady_K[0] == pytest.approx(
        found.forward_K[0] + found.backward_K[0] + found.recompute_K[0] + found.ring_K[0]
    )


def test_what_is_shared_out_evenly_is():
    alone, shared = (model().seconds(slot(context), candidates(zero=0)) for context in (1, 2))
    assert alone.ring_K[0] == alone.forward_ring_K[0] == 0.0
    # As much as half of the rows with the whole of their sequence.
    region = model().region_seconds(2)
    assert shared.forward_K[0] == pytest.approx(region.forward_R.sum())
    plain = model().seconds(slot(1, data_parallel_degree=2), candidates())
    assert shared.update_K[0] == plain.update_K[0]


@pytest.mark.parametrize("degree", [2, 4])
def test_the_last_device_has_more_of_causal_attention(degree):
    found = {}
    for kind in ("causal_attention", "attention"):
        machine = model(fused(kind), devices=degree, link=1e30, latency=0.0)
        region, place = machine.region_seconds(4 / degree), slot(degree)
        added, _ = context_seconds(machine.profile, machine.cluster, place, machine.memory(place), region)
        found[kind] = added[1] / region.forward_R[1]
    assert found["causal_attention"] == pytest.approx((1 - 1 / degree) / stripes_of(LENGTH, degree), rel=1e-3)
    assert found["attention"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_fewer_heads_of_keys_are_fewer_bytes(shared):
    uses = fused(shared=shared)
    assert key_value_bytes(uses, MemoryModel(uses).costs(4)).tolist() == [0, *[4 * 2 * shared * 8 * 4 * LENGTH] * 4, 0]


def test_groups_are_contiguous_if_nothing_else_is_known():
    machine = cluster(8, nodes=2)
    assert context_nodes(machine, slot(4)) == 1
    assert context_nodes(machine, slot(4, tensor_parallel_degree=2)) == 2


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
