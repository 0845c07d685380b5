import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates, StageSlot, stage_memory
from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.cost.memory.memory_model import BUCKETS_IN_FLIGHT, TERMS
from lightning_mist.plan.sharding import BUCKET_BYTES, assign_owners
from lightning_mist.runtime.gradients import reducer
from lightning_mist.runtime.parameters import buckets
from tests.cost.memory.breakdown import breakdown
from tests.plans import plan_of
from tests.specs import ADAMW, spec


def make_plan(layers, *, degree=1, microbatches=1, rows=4, zero=0, checkpointed=0):
    """Stages of equal degree; ``rows`` per microbatch and rank."""
    options = {"data": degree, "zero": zero}
    stages = [{"layers": count, "checkpointed": min(count, checkpointed), **options} for count in layers]
    return plan_of(rows * degree * microbatches, microbatches, *stages)


def test_one_process_by_hand():
    optimizer = dataclasses.replace(ADAMW, step_peak_bytes_per_largest=0.0)
    network = spec(2, parameter_bytes=40_000, edge_bytes=80_000, optimizer=optimizer)
    # ZeRO-1 on one rank shards nothing, but is not what DistributedDataParallel does.
    (memory,) = stage_memory(network, make_plan([2], rows=4, zero=1))
    terms = dict(memory.terms)
    trained = 2 * 80_000 + 2 * 40_400
    assert terms["parameter_bytes"] == trained
    assert terms["optimizer_bytes"] == 2 * trained
    assert terms["buffer_bytes"] == 64
    assert terms["batch_bytes"] == 16 * 4
    # The only backward, at the head: its saved bytes, all other gradients, its peak with its own gradient.
    head = 10 * 100 * 4 + (80_000 + 2 * 40_400) + (2 * 100 * 4 + 80_000)
    # At the first layer: head and layer saved, the gradients above, its peak with its gradient.
    layer = 4 * (1000 + 10_000) + (80_000 + 40_400) + (2 * 1000 * 4 + 40_400)
    # At the tail: everything saved, its peak with its gradient.
    tail = 4 * (1000 + 2 * 10_000 + 4000) + (2 * 400 * 4 + 80_000)
    assert memory.phase == "first backward"
    assert terms["working_bytes"] == max(head, layer, tail)
    assert memory.peak_bytes == sum(terms.values())


def test_plain_data_parallelism_has_the_buckets_of_distributed_data_parallel():
    network = spec(2, parameter_bytes=40_000, edge_bytes=80_000)
    (memory,) = stage_memory(network, make_plan([2], rows=4, degree=2))
    gradients = 2 * 80_000 + 2 * 40_400
    # The gradients' buckets are there before they are; at the tail everything is saved.
    assert memory.phase == "first backward"
    assert dict(memory.terms)["working_bytes"] == gradients + 4 * (1000 + 2 * 10_000 + 4000) + (3 * 400 * 4 + 40_000)


def test_accumulation_keeps_gradients_beside_the_working_set():
    network = spec(2)
    (memory,) = stage_memory(network, make_plan([2], rows=4, microbatches=2))
    terms = dict(memory.terms)
    assert memory.phase == "backward"
    assert terms["gradient_bytes"] == terms["parameter_bytes"]
    assert terms["activation_bytes"] == 0


def test_an_optimizer_step_may_be_the_peak():
    optimizer = dataclasses.replace(spec(2).optimizer, step_peak_bytes_per_parameter_byte=50.0)
    (memory,) = stage_memory(spec(2, optimizer=optimizer), make_plan([2]))
    assert memory.phase == "optimizer step"


def test_earlier_stages_hold_more_microbatches():
    network = spec(6, parameter_bytes=4000, edge_bytes=4000)
    memories = stage_memory(network, make_plan([2, 2, 2], rows=4, microbatches=8))
    activations = [dict(memory.terms)["activation_bytes"] for memory in memories]
    assert activations == [2 * 4 * (1000 + 20_000), 1 * 4 * 20_000, 0]
    # Receive buffers of two microbatches, and of one that is on its way.
    assert dict(memories[1].terms)["transfer_bytes"] >= 3 * 4 * 1000


def test_a_tied_parameter_is_held_by_both_stages():
    tied = stage_memory(spec(4, tied=True), make_plan([2, 2]))
    untied = stage_memory(spec(4), make_plan([2, 2]))
    for one, other in zip(tied, untied, strict=True):
        assert dict(one.terms)["parameter_bytes"] == dict(other.terms)["parameter_bytes"] == 80_000 + 2 * 40_400
    # On one stage it is there once, but its two uses make two gradients that are summed.
    (whole,) = stage_memory(spec(4, tied=True), make_plan([4], microbatches=2))
    terms = dict(whole.terms)
    assert terms["parameter_bytes"] == 80_000 + 4 * 40_400
    assert terms["gradient_bytes"] == terms["parameter_bytes"] + 80_000


def test_zero_one_keeps_the_state_of_the_largest_share():
    network = spec(4)
    (memory,) = stage_memory(network, make_plan([4], degree=3, microbatches=2, zero=1))
    sizes = [parameter.bytes for parameter in network.parameters]
    loads = [0, 0, 0]
    for size, owner in zip(sizes, assign_owners(sizes, 3), strict=True):
        loads[owner] += size
    assert dict(memory.terms)["optimizer_bytes"] == 2 * max(loads)
    (whole,) = stage_memory(network, make_plan([4], degree=3, microbatches=2))
    assert whole.phase == memory.phase
    assert whole.peak_bytes - memory.peak_bytes == 2 * (sum(sizes) - max(loads))


def needs_of(network, *, degree, zero):
    """What the memory of the whole network on one stage is made of."""
    (slot, candidates) = slots_of(make_plan([network.num_layers], degree=degree, microbatches=2, zero=zero))[0]
    return MemoryModel(network).needs(slot, candidates)


def test_zero_two_keeps_what_it_owns_of_gradients():
    network = spec(4, parameter_bytes=400_000, edge_bytes=800_000)
    gradients = 2 * 800_000 + 4 * 404_000
    needs = needs_of(network, degree=2, zero=2)
    owned = max(_loads([800_000, 800_000, *[400_000, 4000] * 4], 2))
    assert needs.always["parameter_bytes"][0] == gradients
    assert needs.always["optimizer_bytes"][0] == 2 * owned
    assert needs.gradients_K[0] == owned
    # At the tail: everything saved, its own gradient, and the head's, of the microbatch before, being reduced.
    assert needs.backward_K[0] == 4 * (1000 + 4 * 10_000 + 4000) + (2 * 4 * 400 + 800_000) + 800_000
    assert needs.pending_K[0] == 800_000
    # The first time, behind the head: its gradients and the copy that leaves, half of the others with their owner, and
    # what the fuller rank owns beyond half of all.
    assert needs.first_backward_K[0] == 2 * 800_000 + (gradients - 800_000) / 2 + (owned - gradients / 2)
    assert needs_of(network, degree=2, zero=1).gradients_K[0] == gradients


def test_zero_three_keeps_what_it_owns_and_two_units():
    network = spec(4, parameter_bytes=400_000, edge_bytes=40_000)
    two, three = needs_of(network, degree=4, zero=2), needs_of(network, degree=4, zero=3)
    assert three.always["parameter_bytes"][0] == max(_loads([40_000, 40_000, *[400_000, 4000] * 4], 4))
    assert two.always["parameter_bytes"][0] == 2 * 40_000 + 4 * 404_000
    # Of some two layers some rank owns nothing.
    assert three.backward_K[0] - two.backward_K[0] == 2 * 404_000
    # The forward is fullest at the last layer, with as much under way as any layer finds.
    assert three.forward_K[0] == 4 * (1000 + 3 * 10_000) + 12 * 4 * 1000 + 2 * 404_000
    gathering = dict(three.update)["parameter gathering"]
    assert gathering["working_bytes"][0] == 0.0


def test_sharding_on_one_rank_shards_nothing():
    network = spec(4)
    for zero in (2, 3):
        alone = stage_memory(network, make_plan([4], microbatches=2, zero=zero))
        assert alone == stage_memory(network, make_plan([4], microbatches=2, zero=1))


def _loads(sizes, ranks):
    loads = [0] * ranks
    for owner, size in zip(assign_owners(sizes, ranks), sizes, strict=True):
        loads[owner] += size
    return loads


def test_gradient_buckets_are_copies():
    network = spec(2, parameter_bytes=400_000, widths=(10,))
    (alone,) = stage_memory(network, make_plan([2], rows=1, microbatches=2))
    (shared,) = stage_memory(network, make_plan([2], rows=1, microbatches=2, degree=2))
    assert shared.phase == "gradient reduction"
    assert shared.peak_bytes > alone.peak_bytes


def test_the_buckets_are_the_runtimes():
    assert BUCKET_BYTES == buckets.BUCKET_BYTES
    assert BUCKETS_IN_FLIGHT == reducer._BUCKETS_IN_FLIGHT


@pytest.mark.parametrize("stage_index", [0, 1, 2])
def test_recomputing_more_layers_never_saves_more(stage_index):
    model = MemoryModel(spec(9, kinds=(0, 1, 0) * 3, widths=(1000, 2000)))
    slot = StageSlot(
        stage_index=stage_index, num_stages=3, num_microbatches=12, data_parallel_degree=2, rows=2, batch_rows=8
    )
    kept = np.arange(4)
    candidates = StageCandidates(
        start_K=np.full(4, 3 * stage_index),
        end_K=np.full(4, 3 * stage_index + 3),
        checkpointed_K=kept,
        zero_stage_K=np.zeros(4, dtype=np.int64),
    )
    saved_K = model.needs(slot, candidates).saved_K
    assert (np.diff(saved_K) < 0).all()
    if stage_index == 0:
        # With three microbatches in flight, recomputation is worth its working set.
        peak_K = model.peaks(slot, candidates)
        assert peak_K[3] < peak_K[0]


def test_many_candidates_at_once_equal_one_by_one():
    network = spec(6, kinds=(0, 1, 1, 0, 1, 0), widths=(1000, 2500), tied=True)
    model = MemoryModel(network)
    slot = StageSlot(
        stage_index=0, num_stages=2, num_microbatches=4, data_parallel_degree=2, rows=3, batch_rows=6, replicas=2
    )
    ends, kept, zero = (grid.reshape(-1) for grid in np.meshgrid(np.arange(1, 6), np.arange(2), np.arange(2)))
    candidates = StageCandidates(
        start_K=np.zeros_like(ends), end_K=ends, checkpointed_K=np.minimum(kept, ends), zero_stage_K=zero
    )
    together = model.peaks(slot, candidates)
    for index in range(len(candidates)):
        one = candidates.take(np.array([index]))
        assert MemoryModel(network).peaks(slot, one)[0] == pytest.approx(together[index], rel=1e-12)
        (memory,) = breakdown(model, slot, one)
        assert [name for name, _ in memory.terms] == list(TERMS)
        assert memory.peak_bytes == pytest.approx(together[index], abs=len(TERMS))


def test_a_rank_holds_every_batch_it_computes_on():
    def slot(**kwargs):
        return StageSlot(stage_index=0, **kwargs)

    alone = slot(num_stages=1, num_microbatches=4, data_parallel_degree=4, rows=1, batch_rows=4, replicas=4)
    assert alone.batches_held == 1
    pair = slot(num_stages=2, num_microbatches=4, data_parallel_degree=2, rows=2, batch_rows=4, replicas=2)
    assert pair.batches_held == 2
    # Three ranks in one replica; this stage's two ranks share every batch.
    wide = slot(num_stages=2, num_microbatches=3, data_parallel_degree=2, rows=2, batch_rows=4, replicas=1)
    assert wide.batches_held == 3


def test_a_module_without_blocks():
    (memory,) = stage_memory(spec(0), make_plan([0], rows=4))
    assert memory.peak_bytes > dict(memory.terms)["parameter_bytes"] > 0


def test_what_is_held_is_shared_by_networks_with_the_same_parameters_only():
    network = spec(3, parameter_bytes=40_000)
    one = MemoryModel(network)
    layers = tuple(dataclasses.replace(item, saved_bytes=item.saved_bytes * 2) for item in network.layers)
    alike = MemoryModel(dataclasses.replace(network, layers=layers), one)
    assert (alike.costs(2).saved_R[1:-1] == 2 * one.costs(2).saved_R[1:-1]).all()
    assert alike.holdings is one.holdings
    assert alike.states is one.states
    assert alike.parted(0.5) is one.parted(0.5)
    fewer = tuple(dataclasses.replace(item, trainable=index > 0) for index, item in enumerate(network.parameters))
    other = MemoryModel(dataclasses.replace(network, parameters=fewer), one)
    assert other.holdings is not one.holdings


def test_gradients_that_are_moved_count_as_not_trained():
    model = MemoryModel(spec(3, parameter_bytes=40_000))
    assert model.parted(0.0) is model.holdings
    trained_P, moved_P = model.holdings.table.trainable_P, model.states.offloaded(0.99, trained=True)
    assert moved_P.any()
    assert model.parted(0.99).table.trainable_P.tolist() == np.where(moved_P, 0, trained_P).tolist()
