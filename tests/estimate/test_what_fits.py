from dataclasses import replace

import pytest

from lightning_mist.estimate import Estimator, estimate_memory
from lightning_mist.estimate.plan_estimate import changes_that_fit
from lightning_mist.hardware import parse_cluster
from lightning_mist.plan import plan_of
from tests.specs import spec, with_splits

GIB = 2**30
BIG = spec(8, parameter_bytes=100_000_000, edge_bytes=200_000_000, widths=(8_000_000,))
FOUR = parse_cluster("1x4xL4")


def changes(network, plan, limit, cluster=FOUR):
    found = changes_that_fit(Estimator(network, cluster, limit), plan)
    for change in found:
        size = change.plan.world_size
        again = estimate_memory(
            network, None, change.plan, replace(cluster, num_nodes=1, devices_per_node=size), memory_limit=limit
        )
        assert again.worst.device_total == change.device_total
        assert change.device_total.p95 <= limit
        assert change.runs
    return {change.text: change.plan for change in found}


def test_the_least_number_of_layers_is_checkpointed():
    plan = plan_of(8, world_size=4, global_batch_size=64)
    limit = 14 * GIB
    text, changed = next(iter(changes(BIG, plan, limit).items()))
    count = changed.stages[0].checkpointing.layers
    assert 1 < count < 8
    assert text == f"{count} layers checkpointed"
    fewer = plan_of(8, world_size=4, global_batch_size=64, checkpointed_layers=count - 1)
    assert estimate_memory(BIG, None, fewer, FOUR, memory_limit=limit).verdict != "fits"


def test_microbatches_and_zero_and_stages():
    plan = plan_of(8, world_size=4, global_batch_size=64)
    found = changes(BIG, plan, 20 * GIB)
    assert found["num_microbatches=2 of 8 rows"].num_microbatches == 2
    assert int(found["zero_stage=1"].stages[0].zero_stage) == 1
    assert found["pipeline_stages=2"].num_stages == 2
    offloaded = found["25% of the activations in host memory"]
    assert offloaded.stages[0].offload.activations == 0.25


def test_changes_are_put_together_where_one_does_not_do():
    plan = plan_of(8, world_size=4, global_batch_size=64, tensor_parallel_degree=1)
    found = changes(BIG, plan, 5 * GIB)
    assert any(" and " in text for text in found)


def test_devices_share_layers_where_that_is_known():
    network = with_splits(BIG, (2, False))
    plan = plan_of(8, world_size=4, global_batch_size=64)
    assert "tensor_parallel_degree=2" in changes(network, plan, 16 * GIB)
    assert "tensor_parallel_degree=2" not in changes(BIG, plan, 16 * GIB)


def test_more_devices_are_the_last_resort():
    plan = plan_of(8, world_size=1, global_batch_size=64)
    found = changes(BIG, plan, 4 * GIB, parse_cluster("1xL4"))
    assert len(found) == 1
    (text, changed), *_ = found.items()
    assert text.startswith(f"{changed.world_size} devices, zero_stage=3")


def test_what_the_network_rules_out_is_not_tried():
    excluded = [(feature, "no") for feature in ("checkpointing", "microbatches", "pipeline")]
    network = spec(8, parameter_bytes=100_000_000, widths=(8_000_000,), exclusions=excluded)
    plan = plan_of(8, world_size=4, global_batch_size=64)
    assert next(iter(changes(network, plan, 20 * GIB))) == "zero_stage=1"
    assert not any(word in text for text in changes(network, plan, 8 * GIB) for word in ("layer", "micro", "stages"))


def test_nothing_helps_a_batch_that_is_too_large():
    network = spec(2, parameter_bytes=1000, widths=(8 * GIB,))
    assert changes(network, plan_of(2, world_size=1, global_batch_size=1), 4 * GIB, parse_cluster("1xL4")) == {}


@pytest.mark.parametrize("limit", [6 * GIB, 22 * GIB])
def test_advice_only_where_it_is_needed(limit):
    plan = plan_of(8, world_size=4, global_batch_size=64)
    estimate = estimate_memory(BIG, None, plan, FOUR, memory_limit=limit)
    assert bool(estimate.changes) == (not estimate.fits())
    assert estimate_memory(BIG, None, plan, FOUR, memory_limit=limit, advise=False).changes == ()
