import itertools

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict, predict_with, step_seconds
from lightning_mist.cost import prediction as breakdown
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage, from_json, row_slice, to_json
from lightning_mist.plan.grid import rank_layout
from lightning_mist.tuner import SearchSpace, tune
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import cluster, profile, spec, with_splits


def search(network, *, devices=2, rows=2, memory=10**12, machine=None, **limits):
    return tune(
        network,
        cluster(devices),
        profile=profile() if machine is None else machine,
        global_batch_size=rows * devices,
        memory_limit=memory,
        search=SearchSpace(**{"schedules": ("1f1b",), **limits}),
    )


def every_plan(network, devices, rows, **limits):
    """Every plan of the search space, one by one."""
    space = apply(SearchSpace(**limits), network, devices, rows * devices)
    for num_stages, count in space.pipelines():
        for shapes in itertools.product(space.shapes(count), repeat=num_stages):
            if sum(shape.devices for shape in shapes) != devices:
                continue
            layout = rank_layout([(shape.data, shape.tensor) for shape in shapes])
            meshes = [shape.mesh(ranks) for shape, ranks in zip(shapes, layout, strict=True)]
            for cuts in itertools.combinations(range(1, network.num_layers), num_stages - 1):
                edges = (0, *cuts, network.num_layers)
                sizes = [end - start for start, end in itertools.pairwise(edges)]
                kept = itertools.product(*(range(size + 1) for size in sizes))
                zero = itertools.product(*(space.search.zero_stages if shape.data > 1 else (0,) for shape in shapes))
                for checkpointed, zeros in itertools.product(kept, list(zero)):
                    yield Plan(
                        global_batch_size=rows * devices,
                        num_microbatches=count,
                        stages=tuple(
                            StagePlan(
                                layers=(edges[i], edges[i + 1]),
                                mesh=mesh,
                                microbatch_size=space.rows(count, mesh.data_parallel_degree),
                                zero_stage=ZeroStage(zeros[i]),
                                checkpointing=Checkpointing(layers=checkpointed[i]),
                            )
                            for i, mesh in enumerate(meshes)
                        ),
                    )


def closed_form(predicted, num_microbatches):
    """What the search minimises."""
    stages = predicted.stages
    steady, boundary = ([getattr(stage, f"{name}_seconds") for stage in stages] for name in ("steady", "boundary"))
    return step_seconds(steady, boundary, num_microbatches)


SHARDED = {"zero_stages": (0, 1, 2, 3)}
SPLIT = {"tensor_parallel_degrees": None}
SMALL = {
    "alike": (spec(4, tied=True, measured=True), 2, 2, {}),
    "mixed": (spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500), measured=True), 3, 2, {}),
    "uneven edges": (spec(3, edge_bytes=400_000, measured=True), 3, 4, {}),
    "sharded": (spec(3, edge_bytes=120_000, measured=True), 4, 1, SHARDED),
    "split": (with_splits(spec(4, measured=True), (2, False), (2, True)), 2, 4, SPLIT),
    "split and sharded": (with_splits(spec(2), (2, False), (4, False), (2, True)), 4, 2, {**SPLIT, **SHARDED}),
}
"""Networks, devices, rows of a batch on each, and limits of the search."""


@pytest.mark.sample
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("share", [1.01, 0.8, 0.65])
def test_no_plan_is_faster(name, share):
    network, devices, rows, limits = SMALL[name]
    model = StageCostModel(network, profile(), cluster(devices))
    predictions = [
        (closed_form(item, plan.num_microbatches), item.step_seconds, max(stage.peak_bytes for stage in item.stages))
        for plan in every_plan(network, devices, rows, **limits)
        for item in [predict_with(model, plan)]
    ]
    # Between what the least and the most demanding plan needs.
    least, most = (f(peak for *_, peak in predictions) for f in (min, max))
    limit = int(least + (most - least) * (share - 0.6))
    found = search(network, devices=devices, rows=rows, memory=limit, **limits)
    fitting = [(seconds, clocked) for seconds, clocked, peak in predictions if peak <= limit]
    wanted = min(seconds for seconds, _ in fitting)
    mine = closed_form(found.predicted, found.plan.num_microbatches)
    assert found.closed_form_seconds == pytest.approx(mine, rel=PRECISION)
    assert mine >= wanted * (1 - PRECISION)
    # On the clock it is at least as fast as some plan with the least closed form, and it is not far from the fastest.
    best = [clocked for seconds, clocked in fitting if seconds <= wanted * (1 + 10 * PRECISION)]
    assert found.predicted.step_seconds <= max(best) * (1 + PRECISION)
    assert found.predicted.step_seconds <= 1.15 * min(clocked for _, clocked in fitting)
    assert max(stage.peak_bytes for stage in found.predicted.stages) <= limit
    assert found.status == "optimal"
    assert found.bound == pytest.approx(wanted, rel=10 * PRECISION)


def test_less_memory_is_never_faster_in_closed_form():
    network = spec(6, tied=True, measured=True)
    seconds = [search(network, devices=4, memory=limit).bound for limit in (10**7, 10**6, 8 * 10**5)]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_of_the_best_by_the_closed_form_the_fastest_on_the_clock_is_chosen(monkeypatch):
    network = spec(4, tied=True, measured=True)
    found = search(network, rows=32, memory=10**6)
    assert found.predicted.step_seconds <= min(item.predicted.step_seconds for item in found.alternatives)
    real, slow = breakdown.clock_seconds, (found.plan.num_stages, found.plan.num_microbatches)

    def slower(plan, *args):
        return real(plan, *args) * (10 if (plan.num_stages, plan.num_microbatches) == slow else 1)

    monkeypatch.setattr(breakdown, "clock_seconds", slower)
    other = search(network, rows=32, memory=10**6)
    assert (other.plan.num_stages, other.plan.num_microbatches) != slow
    assert (other.bound, other.status) == (found.bound, "optimal")
    assert other.closed_form_seconds > other.bound
    assert any("less on the clock than the best plan by the closed form" in note for note in other.notes)


def test_the_plan_obeys_every_rule_and_predicts_itself():
    network = spec(7, kinds=(0, 1, 0, 0, 1, 1, 0), widths=(1000, 2500), tied=True, measured=True)
    found = search(network, devices=4, rows=4, memory=1_200_000)
    plan = found.plan
    for rank, index in itertools.product(range(plan.world_size), range(plan.num_microbatches)):
        row_slice(plan, rank, index)
    assert plan.stage_of(0) == plan.num_stages - 1
    assert plan.predicted == found.predicted == predict(network, profile(), cluster(4), plan)
    for item in found.alternatives:
        assert item.predicted.step_seconds >= found.predicted.step_seconds * (1 - PRECISION)
        assert item.plan.num_stages != plan.num_stages


def test_the_same_question_has_the_same_answer():
    network = spec(6, tied=True, measured=True)
    texts = {to_json(search(network, devices=4, rows=4, memory=900_000).plan) for _ in range(3)}
    assert len(texts) == 1


def test_exclusions_are_kept_and_told():
    network = spec(
        4, measured=True, exclusions=[("pipeline", "it calls a block twice"), ("microbatches", "a batch norm")]
    )
    found = search(network, devices=4, rows=4)
    assert found.plan.num_stages == 1
    assert found.plan.num_microbatches == 1
    assert any("it calls a block twice" in note for note in found.explain())
    assert any("a batch norm" in note for note in found.notes)


def test_a_module_without_blocks_trains_in_parallel():
    found = search(spec(0, measured=True), devices=4, rows=4)
    assert found.plan.bounds == ((0, 0),)
    assert found.plan.stages[0].data_parallel_degree == 4
    assert any("no repeated blocks" in note for note in found.notes)


def test_one_device():
    found = search(spec(4, measured=True), devices=1, rows=4)
    assert (found.plan.num_stages, found.plan.world_size) == (1, 1)


def test_slow_links_favour_stages_and_small_memory_favours_recomputation():
    # Gradients of 3 MB over a link of 1 MB/s against boundaries of 2 kB.
    network = spec(4, parameter_bytes=700_000, measured=True)
    assert search(network, rows=4, machine=profile(link=1e6)).plan.num_stages == 2
    assert search(network, rows=4, machine=profile(link=1e12, latency=0.0)).plan.num_stages == 1
    wide = spec(8, widths=(10_000,), parameter_bytes=4000, edge_bytes=4000, measured=True)
    roomy = search(wide, devices=1, rows=4, num_microbatches=(1,))
    peak = roomy.predicted.stages[0].peak_bytes
    tight = search(wide, devices=1, rows=4, num_microbatches=(1,), memory=peak // 2)
    assert roomy.plan.stages[0].checkpointing.layers == 0
    assert 0 < tight.plan.stages[0].checkpointing.layers < 8


def test_explains_itself():
    lines = search(spec(4, tied=True, measured=True), rows=32).explain()
    assert "no plan of the search space is faster by the closed form of the cost model" in lines[0]
    assert "seconds of layers are measured" in search(spec(4, tied=True, measured=True)).explain()


def test_the_default_memory_limit_is_said():
    found = tune(spec(4), cluster(2, memory=10**9), profile=profile(), global_batch_size=4)
    assert any("80% of the memory of test" in note for note in found.notes)
    assert any("profile's rates (made up)" in note for note in found.notes)


def test_without_time_the_answer_says_how_good_it_is():
    network = spec(12, tied=True, measured=True)
    found = search(network, devices=8, rows=8, memory=800_000, solver_seconds=1e-9)
    best = search(network, devices=8, rows=8, memory=800_000)
    assert best.status == "optimal"
    assert found.bound <= best.bound * (1 + 10 * PRECISION)
    assert found.closed_form_seconds >= best.bound * (1 - 10 * PRECISION)
    if found.status == "time limit":
        assert found.gap > 0
        assert "time was up" in found.explain()[0]


@pytest.mark.parametrize("rows", [1, 2, 6, 7])
def test_a_batch_need_not_be_a_multiple_of_the_devices(rows):
    plan = tune(spec(4), cluster(4), profile=profile(), global_batch_size=rows).plan
    assert plan.global_batch_size == rows
    assert plan.num_loaders == plan.num_replicas < 4
    assert from_json(to_json(plan)) == plan


def test_where_no_degrees_cut_a_batch_evenly_that_is_said():
    with pytest.raises(InfeasibleError, match=r"uses all 4 devices with 7 rows.*equal parts"):
        tune(spec(2), cluster(4), profile=profile(), global_batch_size=7)


def test_plans_from_the_catalog():
    network = spec(8, widths=(4_000_000,), parameter_bytes=50_000_000, edge_bytes=100_000_000)
    found = tune(network, parse_cluster("1x4xL4"), global_batch_size=32, search=SearchSpace(schedules=("1f1b",)))
    assert found.status == "optimal"
    assert np.isfinite(found.predicted.step_seconds)
    source = catalog_profile(parse_cluster("1x4xL4")).source
    assert any(source in note for note in found.notes)
