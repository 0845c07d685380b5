from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import predict, predict_with, step_seconds
from lightning_mist.explain import baselines_with
from lightning_mist.explain.baseline_plans import baseline_notes
from lightning_mist.explain.comparison import compare_plans
from lightning_mist.hardware import MixedCluster, parse_cluster
from lightning_mist.hardware.catalog import with_stack
from lightning_mist.plan import row_slice
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import Planner, SearchSpace, tune
from lightning_mist.tuner.infeasible import UndecidedError
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
    items = baselines_with(
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
    assert (moved.num_stages, moved.stages[0].offload.optimizer, moved.stages[0].offload.parameters) == (1, 1.0, 0.0)
    assert (infinite.stages[0].offload.optimizer, infinite.stages[0].offload.parameters) == (1.0, 1.0)
    for name in NAMES[5:8]:
        assert len({stage.num_layers for stage in items[name].stages}) == 1
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
    items = baselines_with(planner, **asked)
    plans = [item.plan for item in items if item.plan is not None]
    assert not any(stage.mesh.context_parallel_degree > 1 for plan in plans for stage in plan.stages)
    # Ours does, where nothing else fits.
    own = planner.tune(**asked)
    assert (own.plan.stages[0].mesh.context_parallel_degree > 1) == (not plans)


def test_rivals_are_priced_with_their_own_kernels_on_machines_of_the_catalog():
    machine = parse_cluster("4xH100")
    network = replace(NETWORK, precision="bf16-true", seconds=())
    planner = Planner(network, machine)
    items = {item.name: item for item in baselines_with(planner, global_batch_size=16, search=SMALL)}
    for name, item in items.items():
        is_fused = name.startswith("Megatron-LM")
        assert item.stack == ("fused" if is_fused else "")
        if item.plan is not None and name in NAMES[:8]:
            stack = with_stack(planner.profile, "fused" if is_fused else "eager")
            assert item.plan.predicted == predict(network, stack, machine, item.plan)
    own = compare_plans(items["DDP"].plan, items.values(), outside=lambda plan: ())
    assert {item.outside for item in own if item.name.startswith("Megatron-LM")} == {
        ("the kernels of another stack (fused)",)
    }
    # Of a planner for fused kernels all are.
    fused = Planner(network, machine, profile=with_stack(planner.profile, "fused"))
    assert {item.stack for item in baselines_with(fused, global_batch_size=16, search=SMALL)} == {""}
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
    assert items["Aceso"].reason.endswith("with stages that are alike")


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
    items = {item.name: item for item in baselines_with(planner, **asked)}
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
    items = found(host_memory_limit=0)
    assert items["FSDP"].plan is not None
    for name in ("ZeRO-Offload", "ZeRO-Infinity"):
        assert items[name].reason.endswith("of 0 B per device in host memory")


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
    items = {item.name: item for item in baselines_with(slow, global_batch_size=16, memory_limit=10**12)}
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
    items = {item.name: item for item in baselines_with(planner, global_batch_size=16, search=SMALL)}
    assert list(items) == NAMES
    assert items[NAMES[-1]].reason == "not for unlike devices: all its stages have the same"
    grid = items["Megatron-LM, tuned"].plan
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
    baselines_with(
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
