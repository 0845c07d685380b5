import itertools
from dataclasses import replace

import pytest

from lightning_mist.cost import predict_with, step_seconds
from lightning_mist.explain.published_space import MICROBATCH_ROWS, Asked, published_plan
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.space.applied_space import Shape
from tests.specs import cluster, profile, spec, with_splits

DEVICES, ROWS, LAYERS = 2, 8, 4
NETWORK = with_splits(spec(LAYERS, measured=True, parameter_bytes=400_000), (2, False), (2, True))


def found(memory, network=NETWORK, devices=DEVICES, machine=None):
    asked = Asked(
        global_batch_size=ROWS * devices,
        memory_limit=memory,
        host_memory_limit=None,
        search=SearchSpace(offload=()),
    )
    best = published_plan(Planner(network, cluster(devices), profile=machine or profile()), asked)
    assert best.is_best
    return best.plan


def everything(planner):
    """Every plan of the space on two devices, with its prediction."""
    batch = ROWS * DEVICES
    for stages, data, tensor in ((1, 2, 1), (1, 1, 2), (2, 1, 1)):
        shape, layout = Shape(data, tensor), rank_layout([(data, tensor)] * stages)
        for rows, cut in itertools.product(MICROBATCH_ROWS, range(1, LAYERS) if stages == 2 else (LAYERS,)):
            edges = [(0, LAYERS)] if stages == 1 else [(0, cut), (cut, LAYERS)]
            zeros = (1, 2, 3) if data > 1 else (0,)
            choices = [itertools.product(range(end - start + 1), zeros) for start, end in edges]
            for chosen in itertools.product(*choices):
                plan = Plan(
                    global_batch_size=batch,
                    num_microbatches=batch // (rows * data),
                    stages=tuple(
                        StagePlan(
                            layers=edge,
                            mesh=shape.mesh(devices),
                            microbatch_size=rows,
                            zero_stage=ZeroStage(zero),
                            checkpointing=Checkpointing(layers=recomputed),
                        )
                        for edge, devices, (recomputed, zero) in zip(edges, layout, chosen, strict=True)
                    ),
                )
                yield plan, predict_with(planner.model, plan)


def closed_form(item):
    plan, predicted = item
    steady = [stage.steady_seconds for stage in predicted.stages]
    return step_seconds(steady, [stage.boundary_seconds for stage in predicted.stages], plan.num_microbatches)


def peak(item):
    return max(stage.peak_bytes for stage in item[1].stages)


def test_as_fast_as_the_best_by_the_closed_form():
    kinds = set()
    for link, part in itertools.product((1e8, 3e6), (1.0, 0.3, 0.1, 0.0)):
        machine = profile(link=link)
        every = sorted(everything(Planner(NETWORK, cluster(DEVICES), profile=machine)), key=peak)
        limit = peak(every[int(part * (len(every) - 1))])
        plan = found(limit, machine=machine)
        fitting = [item for item in every if peak(item) <= limit]
        best = min(fitting, key=closed_form)
        assert plan.predicted.step_seconds <= best[1].step_seconds * (1 + 1e-12)
        assert any(item == plan.predicted for _, item in fitting)
        kinds.add((plan.num_stages, plan.stages[0].mesh.tensor_parallel_degree))
    assert kinds == {(1, 2), (2, 1)}
    assert found(peak(every[0]) - 1, machine=machine) is None


def test_stages_have_one_mesh_and_nearly_equal_layers():
    network = with_splits(spec(9, measured=True, widths=(10_000,)), (2, False), (2, True))
    for memory in (10**9, 2_000_000, 1_500_000):
        plan = found(memory, network, devices=4)
        if plan is None:
            continue
        assert len({(stage.data_parallel_degree, len(stage.devices)) for stage in plan.stages}) == 1
        assert not any(stage.mesh.sequence_parallel for stage in plan.stages)
        assert plan.num_microbatches & (plan.num_microbatches - 1) == 0
        even = round(9 / plan.num_stages)
        assert all(abs(stage.num_layers - even) <= 2 for stage in plan.stages)
        assert all(stage.microbatch_size in MICROBATCH_ROWS for stage in plan.stages)
        assert all((int(stage.zero_stage) == 0) == (stage.data_parallel_degree == 1) for stage in plan.stages)


def test_no_microbatch_of_so_few_rows():
    # A module whose batches cannot be cut has microbatches of 8 rows.
    network = spec(LAYERS, measured=True, exclusions=[("microbatches", "its loss is no mean")])
    assert found(10**12, network) is None


@pytest.mark.parametrize("degrees", [(1,), (2,)])
def test_limits_of_tensor_parallelism_count(degrees):
    asked = Asked(
        global_batch_size=ROWS * DEVICES,
        memory_limit=None,
        host_memory_limit=None,
        search=SearchSpace(offload=(), tensor_parallel_degrees=degrees),
    )
    plan = published_plan(Planner(NETWORK, cluster(DEVICES), profile=profile()), asked).plan
    assert {stage.mesh.tensor_parallel_degree for stage in plan.stages} == set(degrees)


def test_offload_makes_fit_what_would_not():
    rates = replace(profile(), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=1e9)
    planner = Planner(spec(8, measured=True, parameter_bytes=400_000), cluster(1, kind="cuda"), profile=rates)
    verdicts = set()
    for memory in range(4_000_000, 44_000_000, 4_000_000):
        asked = Asked(
            global_batch_size=4,
            memory_limit=memory,
            host_memory_limit=None,
            search=SearchSpace(offload=OFFLOADED, offload_ratios=(0.0, 1.0)),
        )
        best = published_plan(planner, asked).plan
        without = published_plan(planner, replace(asked, host_memory_limit=0)).plan
        verdicts.add((best is not None, without is not None))
        if without is not None:
            assert not without.stages[0].offload.any
            assert best.predicted.step_seconds <= without.predicted.step_seconds * (1 + 1e-12)
        elif best is not None:
            assert best.stages[0].offload.any
            assert best.predicted.stages[0].peak_bytes <= 0.8 * memory
    assert verdicts == {(False, False), (True, False), (True, True)}
