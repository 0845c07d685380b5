import itertools
from dataclasses import replace

import pytest

from lightning_mist.cost import predict
from lightning_mist.plan import row_slice
from lightning_mist.tuner import SearchSpace, baselines, tune
from tests.specs import cluster, profile, spec, with_splits

NAMES = [
    "data parallel",
    "data parallel, all layers recomputed",
    "data parallel, best recomputation and ZeRO stage",
    "data parallel, everything sharded",
    "even pipeline",
    "even grid of tensor, data and pipeline parallelism",
]


EVERYTHING = SearchSpace(zero_stages=(0, 1, 2, 3), tensor_parallel_degrees=None)


def found(network, *, devices=4, rows=4, memory=10**12):
    items = baselines(
        network,
        cluster(devices),
        profile=profile(),
        global_batch_size=rows * devices,
        memory_limit=memory,
        search=EVERYTHING,
    )
    assert [item.name for item in items] == NAMES
    return items


NETWORK = with_splits(spec(7, tied=True, measured=True), (2, False), (2, True), (4, False))


def test_each_is_what_it_says():
    plain, recomputed, best, sharded, even, grid = (item.plan for item in found(NETWORK))
    assert (plain.num_stages, plain.num_microbatches, plain.stages[0].checkpointing.layers) == (1, 1, 0)
    assert recomputed.stages[0].checkpointing.layers == 7
    assert best.num_stages == 1
    sizes = [stage.num_layers for stage in even.stages]
    assert even.num_stages > 1
    assert max(sizes) - min(sizes) <= 1
    assert len({stage.data_parallel_degree for stage in even.stages}) == 1
    assert (sharded.num_stages, int(sharded.stages[0].zero_stage)) == (1, 3)
    (mesh,) = {replace(stage.mesh, devices=tuple(range(len(stage.devices)))) for stage in grid.stages}
    assert mesh.tensor_parallel_degree > 1


@pytest.mark.parametrize("memory", [10**12, 1_500_000, 1_000_000])
def test_a_search_is_never_slower(memory):
    plan = tune(NETWORK, cluster(4), profile=profile(), global_batch_size=16, memory_limit=memory, search=EVERYTHING)
    plan = plan.predicted
    items = [item for item in found(NETWORK, memory=memory) if item.plan is not None]
    assert items
    for item in items:
        assert plan.step_seconds <= item.plan.predicted.step_seconds * (1 + 1e-9)
        assert item.plan.predicted == predict(NETWORK, profile(), cluster(4), item.plan)
        assert max(stage.peak_bytes for stage in item.plan.predicted.stages) <= memory


def test_recomputation_is_tuned_and_not_all_or_nothing():
    wide = spec(8, widths=(10_000,), parameter_bytes=4000, edge_bytes=4000, measured=True)
    recomputed = found(wide, devices=1, rows=1)[1]
    plain = found(wide, devices=1, rows=1)[0].plan.predicted.stages[0].peak_bytes
    memory = (plain + recomputed.plan.predicted.stages[0].peak_bytes) // 2
    none, everything, best, *_ = found(wide, devices=1, rows=1, memory=memory)
    assert none.plan is None
    assert "needs at least" in none.reason
    assert 0 < best.plan.stages[0].checkpointing.layers < 8
    assert best.plan.predicted.step_seconds < everything.plan.predicted.step_seconds


def test_what_a_module_does_not_allow_is_said():
    network = spec(4, measured=True, exclusions=[("pipeline", "x"), ("checkpointing", "y")])
    items = {item.name: item for item in found(network)}
    for name in ("even pipeline", "data parallel, all layers recomputed", NAMES[-1]):
        assert items[name].plan is None
        assert "does not allow" in items[name].reason
    assert items["data parallel"].plan is not None


def test_even_pipelines_keep_the_row_rules():
    for item in found(NETWORK, devices=6, rows=4)[-2:]:
        for rank, index in itertools.product(range(6), range(item.plan.num_microbatches)):
            row_slice(item.plan, rank, index)
