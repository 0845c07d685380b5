import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import predict, predict_with, step_seconds
from lightning_mist.explain import baselines
from lightning_mist.explain.baseline_plans import ComparedPlan, baseline_notes, compare_plans, faster_notes
from lightning_mist.hardware import MixedCluster, parse_cluster
from lightning_mist.hardware.catalog import with_stack
from lightning_mist.plan import (
    Checkpointing,
    Plan,
    Predicted,
    PredictedStage,
    StageMesh,
    StagePlan,
    StepWork,
    ZeroStage,
    row_slice,
)
from lightning_mist.plan.grid import rank_layout
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import Planner, SearchSpace, tune
from lightning_mist.tuner.infeasible import UndecidedError
from lightning_mist.tuner.space.applied_space import Shape
from tests.specs import cluster, profile, spec, with_splits
from tests.tuner.select.test_context_plans import network as sharing_rows

NAMES = [
    "DDP",
    "DDP, tuned",
    "FSDP",
    "ZeRO-Offload",
    "ZeRO-Infinity",
    "Megatron-LM, nothing recomputed",
    "Megatron-LM, all recomputed",
    "Megatron-LM, tuned",
    "Aceso",
    "Mist paper's space",
]
MACHINE = replace(
    profile(),
    host_to_device_bytes_per_second=2e8,
    device_to_host_bytes_per_second=1e8,
    host_bytes_per_second_per_node=0,
)
NETWORK = with_splits(
    spec(8, tied=True, measured=True, parameter_bytes=400_000), (2, False), (2, True), (4, False), (4, True)
)
SMALL = SearchSpace(offload=OFFLOADED, offload_ratios=(0.0, 1.0))


def found(network=NETWORK, *, devices=4, rows=4, memory=10**12, kind="cuda", **more):
    items = baselines(
        Planner(network, cluster(devices, kind=kind), profile=MACHINE),
        global_batch_size=rows * devices,
        memory_limit=memory,
        search=SMALL,
        **more,
    )
    assert [item.name for item in items] == NAMES
    assert all((item.plan is None) == bool(item.reason) for item in items)
    return {item.name: item for item in items}


def test_each_is_what_it_says():
    items = {name: item.plan for name, item in found().items()}
    ddp, sharded, moved, infinite = (items[name] for name in ("DDP", "FSDP", "ZeRO-Offload", "ZeRO-Infinity"))
    assert (ddp.num_stages, ddp.num_microbatches, ddp.stages[0].checkpointing.layers) == (1, 1, 0)
    assert {int(items[name].stages[0].zero_stage) for name in ("DDP", "DDP, tuned")} == {0}
    assert (sharded.num_stages, sharded.stages[0].offload.any) == (1, False)
    assert int(sharded.stages[0].zero_stage) in (2, 3)
    assert (moved.num_stages, moved.stages[0].offload.parameters, moved.stages[0].offload.activations) == (1, 0.0, 0.0)
    assert (infinite.num_stages, int(infinite.stages[0].zero_stage)) == (1, 3)
    for name in NAMES[5:8]:
        assert len({stage.num_layers for stage in items[name].stages}) == 1
        assert len({(stage.data_parallel_degree, len(stage.devices)) for stage in items[name].stages}) == 1
        assert {int(stage.zero_stage) for stage in items[name].stages} <= {0, 1}
    assert all(stage.checkpointing.layers == 0 for stage in items[NAMES[5]].stages)
    assert all(stage.checkpointing.layers == stage.num_layers for stage in items[NAMES[6]].stages)
    for stage in items["Aceso"].stages:
        assert (int(stage.zero_stage), stage.mesh.sequence_parallel, stage.offload.any) == (0, False, False)
    for item in items.values():
        assert item.predicted == predict(NETWORK, MACHINE, cluster(4, kind="cuda"), item)
        row_slice(item, 3, item.num_microbatches - 1)


@pytest.mark.parametrize("memory", [60_000_000, 80_000_000])
def test_none_shares_rows(memory):
    planner = Planner(sharing_rows(2, 4), cluster(4), profile=profile(link=1e9))
    asked = {"global_batch_size": 4, "memory_limit": memory, "search": SearchSpace(offload=())}
    items = baselines(planner, **asked)
    plans = [item.plan for item in items if item.plan is not None]
    assert not any(stage.mesh.context_parallel_degree > 1 for plan in plans for stage in plan.stages)
    # Ours does, where nothing else fits.
    own = planner.tune(**asked)
    assert (own.plan.stages[0].mesh.context_parallel_degree > 1) == (not plans)


def test_rivals_are_priced_with_their_own_kernels_on_machines_of_the_catalog():
    machine = parse_cluster("4xH100")
    network = replace(NETWORK, precision="bf16-true", seconds=())
    planner = Planner(network, machine)
    items = {item.name: item for item in baselines(planner, global_batch_size=16, search=SMALL)}
    for name, item in items.items():
        is_fused = name.startswith("Megatron-LM")
        assert item.stack == ("fused" if is_fused else "")
        if item.plan is not None and name in NAMES[:8]:
            stack = with_stack(planner.model.profile, "fused" if is_fused else "eager")
            assert item.plan.predicted == predict(network, stack, machine, item.plan)
    own = compare_plans(items["DDP"].plan, items.values())
    assert all("kernels of another stack (fused)" in note for note in faster_notes(own) if note.startswith("Megatron"))
    # Of a planner for fused kernels all are.
    fused = Planner(network, machine, profile=with_stack(planner.model.profile, "fused"))
    assert {item.stack for item in baselines(fused, global_batch_size=16, search=SMALL)} == {""}
    assert not any(item.stack for item in found().values())


def test_tuned_ones_are_no_slower_than_those_they_contain():
    for memory in (10**12, 2_000_000, 1_500_000):
        items = found(memory=memory)
        for name, others in (("DDP, tuned", NAMES[:1]), ("Megatron-LM, tuned", [*NAMES[:2], *NAMES[5:7]])):
            for other in others:
                if items[other].plan is not None:
                    least = items[name].plan.predicted.step_seconds
                    # What is compared by the closed form may be turned round on the clock.
                    assert least <= items[other].plan.predicted.step_seconds * 1.02


def closed_form(plan):
    stages = plan.predicted.stages
    times = ([stage.steady_seconds for stage in stages], [stage.boundary_seconds for stage in stages])
    return step_seconds(*times, plan.num_microbatches)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_never_slower(seed):
    """No baseline whose plan is one of those searched is faster by the form that the search minimises."""
    random = np.random.default_rng(seed)
    layers, rows = int(random.integers(2, 9)), int(random.choice([1, 2, 4]))
    network = spec(
        layers,
        tied=bool(random.integers(2)),
        measured=bool(random.integers(2)),
        parameter_bytes=int(random.choice([40_000, 400_000])),
        widths=(int(random.choice([1000, 10_000])),),
    )
    network = with_splits(network, (2, False), (2, True))
    plain = found(network, rows=rows)["DDP"].plan
    memory = int(plain.predicted.stages[0].peak_bytes / 0.8 * random.uniform(0.4, 1.2))
    compared = 0
    items = found(network, rows=rows, memory=memory)
    if all(item.plan is None for item in items.values()):
        return
    result = tune(
        network, cluster(4, kind="cuda"), profile=MACHINE, global_batch_size=4 * rows, memory_limit=memory, search=SMALL
    )
    assert result.status != "time limit"
    for item in items.values():
        if item.plan is not None and item.plan.schedule == "1f1b":
            assert closed_form(item.plan) >= result.bound * (1 - 1e-9), item.name
            assert max(stage.peak_bytes for stage in item.plan.predicted.stages) <= 0.8 * memory
            compared += 1
    assert compared


def test_recomputation_is_tuned_and_not_all_or_nothing():
    wide = spec(8, widths=(10_000,), parameter_bytes=4000, edge_bytes=4000, measured=True)
    plain = found(wide, devices=1, rows=1, kind="cpu")
    least = plain["Megatron-LM, all recomputed"].plan.predicted
    most = plain["DDP"].plan.predicted.stages[0].peak_bytes
    memory = (most + least.stages[0].peak_bytes) // 2
    items = found(wide, devices=1, rows=1, memory=memory, kind="cpu")
    assert items["DDP"].plan is None
    assert items["DDP"].reason.startswith("does not fit: needs ")
    best = items["DDP, tuned"].plan
    assert 0 < best.stages[0].checkpointing.layers < 8
    assert best.predicted.step_seconds < items["Megatron-LM, all recomputed"].plan.predicted.step_seconds


def test_what_does_not_fit_says_what_it_needs():
    items = found(memory=100_000)
    for name in NAMES:
        assert items[name].plan is None
        assert "of 78.1 KiB per device" in items[name].reason


def test_what_divides_no_batch_does_not_fail_to_fit():
    """12 rows on each of 2 devices leave the published space no power of two of microbatches of 1, 2 or 4 rows."""
    items = found(devices=2, rows=12)
    assert items["DDP"].plan is not None
    items = found(devices=2, rows=48)
    reason = items["Mist paper's space"].reason
    assert reason == "no number of microbatches or stages that it allows divides this batch"
    assert items["DDP"].plan is not None


def test_searches_that_are_cut_short_say_so():
    planner = Planner(NETWORK, cluster(4, kind="cuda"), profile=MACHINE)
    search = replace(SMALL, solver_seconds=1e-9)
    asked = {"global_batch_size": 16, "memory_limit": 10**12, "search": search}
    items = {item.name: item for item in baselines(planner, **asked)}
    assert items["Aceso"].note == "the best found in the time that there was"
    published = items["Mist paper's space"]
    said = (
        "not decided in time: none was found, and whether one fits is not known",
        "the best found in the time that there was",
    )
    assert said == (published.reason or said[0], published.note or said[1])
    assert published.reason or published.note


def test_what_is_not_decided_in_time_is_not_said_not_to_fit(monkeypatch):
    def undecided(self, **asked):
        raise UndecidedError("no plan was found in solver_seconds")

    monkeypatch.setattr(Planner, "tune", undecided)
    items = found(devices=2, rows=2)
    assert items["Aceso"].plan is None
    assert items["Aceso"].reason == "not decided in time: none was found, and whether one fits is not known"


def test_host_memory_limits_what_is_offloaded():
    assert found()["ZeRO-Offload"].plan.stages[0].offload.any
    items = found(host_memory_limit=0)
    for name in ("FSDP", "ZeRO-Offload", "ZeRO-Infinity"):
        assert not items[name].plan.stages[0].offload.any
    # With so much only what moves most to the host fits.
    assert found(memory=6_080_000)["ZeRO-Infinity"].plan.stages[0].offload.any
    items = found(memory=6_080_000, host_memory_limit=0)
    assert items["ZeRO-Infinity"].reason.endswith("of 0 B per device in host memory")


def test_what_a_module_does_not_allow_is_said():
    network = spec(4, measured=True, exclusions=[("pipeline", "x"), ("checkpointing", "y")])
    items = found(network)
    assert "does not fit" not in items["Megatron-LM, all recomputed"].reason
    assert items["Megatron-LM, tuned"].plan.num_stages == 1
    assert items["DDP"].plan is not None


def test_devices_that_have_no_host():
    items = found(kind="cpu")
    for name in ("ZeRO-Offload", "ZeRO-Infinity"):
        assert "compute in host memory" in items[name].reason
    assert not any(stage.offload.any for stage in items["Mist paper's space"].plan.stages)
    slow = Planner(NETWORK, cluster(4, kind="cuda"), profile=profile())
    items = {item.name: item for item in baselines(slow, global_batch_size=16, memory_limit=10**12)}
    assert "offload needs both rates" in items["ZeRO-Offload"].reason


def test_unlike_devices():
    # Devices of the second part are twice as fast and have less memory.
    network = replace(NETWORK, seconds=())
    slow, fast = cluster(2, kind="cuda", memory=12_000_000), cluster(2, kind="cuda", memory=8_000_000)
    quick = replace(
        MACHINE,
        compute=tuple(
            replace(item, flops_per_second=tuple(2 * rate for rate in item.flops_per_second))
            for item in MACHINE.compute
        ),
    )
    whole = MixedCluster(parts=(slow, fast), link=None)
    planner = Planner(network, whole, profile=(MACHINE, quick))
    items = {item.name: item for item in baselines(planner, global_batch_size=16, search=SMALL)}
    assert list(items) == NAMES
    assert items[NAMES[-1]].reason == "not for unlike devices: all its stages have the same"
    grid = items["Megatron-LM, tuned"].plan
    assert len({(stage.data_parallel_degree, len(stage.devices)) for stage in grid.stages}) == 1
    assert grid == replace(grid, predicted=predict_with(planner.model, grid))
    plans = [item.plan for item in items.values() if item.plan is not None]
    for plan in plans:
        for stage, shown in zip(plan.stages, plan.predicted.stages, strict=True):
            room = min((slow if rank < 2 else fast).device.memory_bytes for rank in stage.devices)
            assert shown.peak_bytes <= 0.8 * room
    found = planner.tune(global_batch_size=16, search=SMALL)
    for plan in plans:
        if plan.schedule == "1f1b":
            assert closed_form(plan) >= found.bound * (1 - 1e-9)


def test_progress_is_told():
    said = []
    baselines(
        Planner(NETWORK, cluster(2), profile=profile()), global_batch_size=2, memory_limit=10**12, tell=said.append
    )
    assert len(said) == len(NAMES)


def test_selective_recomputation_is_explained():
    assert "have no fused attention" in baseline_notes(NETWORK)[1]
    assert "in the next forward, which hides giving out parameters" in baseline_notes(NETWORK)[2]
    block = NETWORK.layers[0]
    work = tuple(replace(item, kind="causal_attention") for item in block.forward_work)
    fused = replace(NETWORK, layers=(replace(block, forward_work=work),))
    assert "the same as none recomputed" in baseline_notes(fused)[1]


def plan(seconds, *, microbatches=2, tokens=None):
    work = StepWork(
        model_flops=1e9, peak_flops_per_second=0.0, peak_source="", roofline_seconds=0.0, sequence_length=tokens
    )
    stages = tuple(
        StagePlan(layers=edge, mesh=StageMesh(devices=(rank,)), microbatch_size=8 // microbatches)
        for edge, rank in (((0, 2), 1), ((2, 4), 0))
    )
    shown = tuple(
        PredictedStage(
            steady_seconds=1.0, boundary_seconds=0.0, forward_seconds=0.3, backward_seconds=0.7, peak_bytes=peak
        )
        for peak in (3000, 2000)
    )
    return Plan(
        global_batch_size=8,
        num_microbatches=microbatches,
        stages=stages,
        predicted=Predicted(step_seconds=seconds, stages=shown, work=work),
    )


def test_figures():
    others = [
        ComparedPlan(name="slow", plan=plan(4.0, tokens=16)),
        ComparedPlan(name="none", plan=None, reason="too large"),
    ]
    ours, slow, none = compare_plans(plan(2.0, microbatches=4), others)
    assert (ours.name, ours.step_seconds, ours.ratio, ours.rows_per_second) == ("this plan", 2.0, 1.0, 4.0)
    assert (ours.tokens_per_second, ours.peak_bytes) == (None, 3000)
    assert ours.settings == "pp 2, microbatch 2 x 4"
    assert (slow.name, slow.ratio, slow.rows_per_second, slow.tokens_per_second) == ("slow", 2.0, 2.0, 32.0)
    assert slow.plan == others[0].plan
    assert (none.plan, none.reason, none.ratio, none.step_seconds) == (None, "too large", None, None)


def test_a_plan_without_a_prediction_cannot_be_compared():
    with pytest.raises(ValueError, match="only plans whose seconds are predicted"):
        compare_plans(replace(plan(1.0), predicted=None), [])


def test_what_is_faster_is_said_once_with_what_it_does():
    ours, quick = plan(2.0), plan(1.9)
    others = [
        ComparedPlan(name="slow", plan=plan(2.1)),
        ComparedPlan(name="alike", plan=plan(1.99)),
        ComparedPlan(name="quick", plan=quick),
        ComparedPlan(name="as quick", plan=quick),
        ComparedPlan(name="late", plan=replace(plan(1.97), schedule="zb-h1")),
        ComparedPlan(name="fused", plan=plan(1.5), stack="fused", precision="bf16-mixed"),
        ComparedPlan(name="none", plan=None, reason="too large"),
    ]
    first, late, fused = faster_notes(compare_plans(ours, others))
    assert first == (
        "quick takes 5.0% less on the clock: pp 2, microbatch 4 x 2. Its plan is in what --json prints, under compare"
    )
    assert late.startswith("late takes 1.5% less on the clock: schedule zb-h1 in place of 1f1b. ")
    assert "25.0% less on the clock: the kernels of another stack (fused); bf16-mixed. " in fused


def test_the_published_space_has_one_arrangement_of_devices_and_small_microbatches():
    network = with_splits(spec(9, measured=True, widths=(10_000,)), (2, False), (2, True))
    for memory in (10**9, 1_500_000):
        plan = found(network, rows=8, memory=memory)["Mist paper's space"].plan
        if plan is None:
            continue
        assert len({(stage.data_parallel_degree, len(stage.devices)) for stage in plan.stages}) == 1
        assert not any(stage.mesh.sequence_parallel for stage in plan.stages)
        assert plan.num_microbatches & (plan.num_microbatches - 1) == 0
        assert all(stage.microbatch_size in (1, 2, 4) for stage in plan.stages)
        assert all((int(stage.zero_stage) == 0) == (stage.data_parallel_degree == 1) for stage in plan.stages)


@pytest.mark.parametrize("link", [1e8, 3e6])
def test_the_published_space_is_searched_as_exactly_as_any(link):
    """Against every plan of it on two devices without offload, by the closed form of the step."""
    network = with_splits(spec(4, measured=True, parameter_bytes=400_000), (2, False), (2, True))
    planner = Planner(network, cluster(2), profile=profile(link=link))
    every = sorted(_everything(planner), key=lambda plan: max(stage.peak_bytes for stage in plan.predicted.stages))
    kinds = set()
    for part in (1.0, 0.3, 0.1, 0.0):
        limit = max(stage.peak_bytes for stage in every[int(part * (len(every) - 1))].predicted.stages)
        items = baselines(planner, global_batch_size=16, memory_limit=limit, search=SearchSpace(offload=()))
        plan = items[-1].plan
        fitting = [item for item in every if max(stage.peak_bytes for stage in item.predicted.stages) <= limit]
        assert closed_form(plan) <= min(map(closed_form, fitting)) * 1.01
        kinds.add((plan.num_stages, plan.stages[0].mesh.tensor_parallel_degree))
    assert kinds


def _everything(planner):
    for stages, data, tensor in ((1, 2, 1), (1, 1, 2), (2, 1, 1)):
        shape, layout = Shape(data, tensor), rank_layout([(data, tensor)] * stages)
        for rows, cut in itertools.product((1, 2, 4), range(1, 4) if stages == 2 else (4,)):
            edges = [(0, 4)] if stages == 1 else [(0, cut), (cut, 4)]
            zeros = (1, 2, 3) if data > 1 else (0,)
            choices = [itertools.product(range(end - start + 1), zeros) for start, end in edges]
            for chosen in itertools.product(*choices):
                made = [
                    StagePlan(
                        layers=edge,
                        mesh=shape.mesh(devices),
                        microbatch_size=rows,
                        zero_stage=ZeroStage(zero),
                        checkpointing=Checkpointing(layers=recomputed),
                    )
                    for edge, devices, (recomputed, zero) in zip(edges, layout, chosen, strict=True)
                ]
                plan = Plan(global_batch_size=16, num_microbatches=16 // (rows * data), stages=tuple(made))
                yield replace(plan, predicted=predict_with(planner.model, plan))
