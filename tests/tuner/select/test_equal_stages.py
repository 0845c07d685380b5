import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict_with, step_seconds
from lightning_mist.errors import InfeasibleError
from lightning_mist.plan.grid import rank_layout
from lightning_mist.tuner import tune
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.options import OPTIONS
from lightning_mist.tuner.select import schedule_variants
from lightning_mist.tuner.select.equal_stages import even_chunks
from lightning_mist.tuner.space.applied_space import SearchSpace, Shape, apply, divisors
from lightning_mist.tuner.space.usable_memory import usable_bytes
from tests.plans import plan_of
from tests.specs import cluster, profile, spec, with_splits

NETWORK = with_splits(
    spec(8, tied=True, measured=True, parameter_bytes=400_000), (2, False), (2, True), (4, False), (4, True)
)
MACHINE = replace(
    profile(),
    host_to_device_bytes_per_second=2e8,
    device_to_host_bytes_per_second=1e8,
    host_bytes_per_second_per_node=0,
)
MODEL = StageCostModel(NETWORK, MACHINE, cluster(4, kind="cuda"))
DEVICES, ROWS = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with stages that are all alike, in words of what they have."""

    recomputes: str = "best"
    has_chunks: bool = True

    @property
    def search(self):
        """The same for the planner."""
        return SearchSpace(
            equal_stages=True,
            zero_stages=(0, 1),
            checkpointing=self.recomputes != "none",
            checkpointed_shares=(1.0,) if self.recomputes == "all" else None,
            offload=(),
            schedules=("1f1b", "interleaved-1f1b") if self.has_chunks else ("1f1b",),
        )


GRID = Family()


def fastest(family, network=NETWORK, memory=10**12):
    """The fastest plan of a family whose tensors take so many bytes; none if none fits."""
    machine = cluster(DEVICES, kind="cuda")
    limit = next(item for item in range(int(memory / 0.8), 2 * memory) if usable_bytes(machine, item) >= memory)
    try:
        return tune(
            network,
            machine,
            profile=MACHINE,
            global_batch_size=ROWS * DEVICES,
            memory_limit=limit,
            search=family.search,
        ).plan
    except InfeasibleError:
        return None


def alike(stages, microbatches, shape, checkpointed, zero, chunks):
    layout, count = rank_layout([(shape.data, shape.tensor)] * stages), 8 // (stages * chunks)
    kept = {"layers": count, "zero": zero, "checkpointed": checkpointed}
    shared = {"tensor": shape.tensor, "sequence": shape.sequence}
    made = [{**kept, **shared, "devices": layout[index % stages]} for index in range(stages * chunks)]
    schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
    return plan_of(ROWS * DEVICES, microbatches, *made, schedule=schedule)


def stages(search, memory=np.inf, link=1e8):
    """What stages of a search space may be, with links of so many bytes per second."""
    space = apply(search, NETWORK, DEVICES, ROWS * DEVICES, devices_per_node=DEVICES)
    model = MODEL if link == 1e8 else StageCostModel(NETWORK, profile(link=link), cluster(4, kind="cuda"))
    return IntraStage(model, space, memory)


@cache
def everything(family):
    """Every plan of a family, with its prediction."""
    return tuple(replace(plan, predicted=predict_with(MODEL, plan)) for plan in _plans(family))


def _plans(family):
    kinds = [(1, False), (2, False), (2, True), (4, False), (4, True)]
    for stages, (tensor, sequence), part in itertools.product(divisors(DEVICES), kinds, divisors(ROWS)):
        if DEVICES % (stages * tensor):
            continue
        shape, microbatches = Shape(DEVICES // (stages * tensor), tensor, sequence), part * stages * tensor
        for chunks in (1, 2, 4) if family.has_chunks and stages > 1 else (1,):
            count = 8 // (stages * chunks)
            if chunks * stages > 8 or microbatches % stages:
                continue
            recomputed = {"none": [0], "all": [count], "best": range(count + 1)}[family.recomputes]
            for checkpointed, zero in itertools.product(recomputed, (0, 1) if shape.data > 1 else (0,)):
                yield alike(stages, microbatches, shape, checkpointed, zero, chunks)


def peak(plan):
    return max(stage.peak_bytes for stage in plan.predicted.stages)


def closed_form(plan):
    stages = plan.predicted.stages
    times = ([stage.steady_seconds for stage in stages], [stage.boundary_seconds for stage in stages])
    return step_seconds(*times, plan.num_microbatches)


@pytest.mark.parametrize("recomputes", ["none", "all", "best"])
def test_a_grid_is_as_fast_as_the_best_by_the_closed_form_and_as_any_with_chunks(recomputes):
    family = replace(GRID, recomputes=recomputes)
    every = sorted(everything(family), key=peak)
    used = set()
    for limit in (10**12, *(peak(every[int(part * (len(every) - 1))]) for part in (0.75, 0.5, 0.25, 0.0))):
        found = fastest(family, memory=limit)
        fitting = [plan for plan in every if peak(plan) <= limit]
        assert found in fitting
        used.add(found.schedule)
        whole = [plan for plan in fitting if plan.schedule == "1f1b"]
        chunked = [plan for plan in fitting if plan.schedule != "1f1b"]
        rivals = sorted(whole, key=closed_form)[:1] + chunked
        # Of plans that are as fast but for what lies between runs the simplest is taken.
        assert found.predicted.step_seconds <= min(plan.predicted.step_seconds for plan in rivals) * (1 + OPTIONS.alike)
    assert used == {"1f1b", "interleaved-1f1b"}


def test_chunks_shorten_a_bubble():
    whole, chunked = fastest(replace(GRID, has_chunks=False)), fastest(GRID)
    assert (whole.schedule, chunked.schedule) == ("1f1b", "interleaved-1f1b")
    assert chunked.predicted.step_seconds < whole.predicted.step_seconds


def test_stages_have_equally_many_layers():
    # 6 layers cannot be dealt out to 4 equal stages.
    for limit in (10**12, 1_400_000, 1_100_000):
        found = fastest(replace(GRID, has_chunks=False), spec(6, measured=True), memory=limit)
        assert found is None or found.num_stages in (1, 2)


@pytest.mark.parametrize(
    "limits",
    [
        {"zero_stages": (0, 1)},
        {"zero_stages": (0,), "chunks": (2,)},
        {"zero_stages": (0, 1), "num_stages": (4,), "checkpointing": False},
        {"zero_stages": (1,), "num_microbatches": (8,), "tensor_parallel_degrees": (1,)},
        {"zero_stages": (0, 1), "data_parallel_degrees": (2,), "tensor_parallel_degrees": (1,)},
    ],
)
def test_even_chunks_of_a_search(limits):
    space = SearchSpace(**limits)
    every = [plan for plan in everything(GRID) if plan.schedule != "1f1b" and _allowed(plan, space)]
    best = even_chunks(stages(space), below=np.inf)
    assert best in every
    assert best.predicted.step_seconds <= min(plan.predicted.step_seconds for plan in every) * (1 + 1e-12)
    assert even_chunks(stages(space), below=best.predicted.step_seconds) is None


def test_layers_that_do_not_come_out_even_are_more_in_the_middle():
    network = with_splits(spec(9, measured=True), (2, False))
    model = StageCostModel(network, MACHINE, cluster(4, kind="cuda"))
    search = SearchSpace(num_stages=(4,), schedules=("interleaved-1f1b",))
    best = even_chunks(IntraStage(model, apply(search, network, 4, ROWS), 1e12), below=np.inf)
    assert [sum(best.stages[index].num_layers for index in best.chunks(group)) for group in range(4)] == [2, 3, 2, 2]
    assert best.predicted == predict_with(model, best)


def test_the_memory_of_chunks_that_take_too_long_is_not_added_up(monkeypatch):
    best = even_chunks(stages(SearchSpace(zero_stages=(0,))), below=np.inf)
    asked, real = [], schedule_variants.plans_peaks
    monkeypatch.setattr(
        schedule_variants, "plans_peaks", lambda model, items: asked.extend(items) or real(model, items)
    )
    assert even_chunks(stages(SearchSpace(zero_stages=(0,))), below=best.predicted.step_seconds * (1 + 1e-9)) == best
    assert len([plan for plan, _ in asked if plan.schedule == "interleaved-1f1b"]) == 1
    asked.clear()
    assert even_chunks(stages(SearchSpace(zero_stages=(0,))), below=best.predicted.step_seconds) is None
    assert not [plan for plan, _ in asked if plan.schedule == "interleaved-1f1b"]


@pytest.mark.parametrize("link", [1e8, 1e6])
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_chunks_are_not_ruled_out_by_what_they_reduce(link, zero_stage, count):
    search = SearchSpace(zero_stages=(zero_stage,), num_microbatches=(count,), tensor_parallel_degrees=(1,))
    best = even_chunks(stages(search, link=link), below=np.inf)
    assert even_chunks(stages(search, link=link), below=best.predicted.step_seconds * (1 + 1e-9)) == best


def test_chunks_of_unlike_layers_are_not_ruled_out_by_what_stages_in_one_piece_reduce():
    network = spec(16, kinds=(0,) * 12 + (9,) * 4, widths=(1000,) * 10, parameter_bytes=400_000)
    model = StageCostModel(network, profile(link=3e5), cluster(8, kind="cuda"))
    degrees = {"num_microbatches": (16,), "num_stages": (4,), "tensor_parallel_degrees": (1,)}
    search = SearchSpace(zero_stages=(2,), chunks=(4,), offload=(), **degrees)
    intra = IntraStage(model, apply(search, network, 8, 64, devices_per_node=8), np.inf)
    best = even_chunks(intra, below=np.inf)
    assert even_chunks(intra, below=best.predicted.step_seconds * (1 + 1e-9)) == best


@pytest.mark.parametrize("heavy", [0, 4])
@pytest.mark.parametrize("memory", [np.inf, 3_100_000])
def test_chunks_of_unlike_layers_are_not_ruled_out_by_what_stages_in_one_piece_compute_and_hold(heavy, memory):
    # Four of the layers take ten times as long and hold as much more: one of four stages in one piece has all of them.
    kinds = [9 if heavy <= index < heavy + 4 else 0 for index in range(16)]
    network = spec(16, kinds=kinds, widths=(1000,) * 10)
    model = StageCostModel(network, profile(), cluster(4, kind="cuda"))
    degrees = {"num_microbatches": (8,), "num_stages": (4,), "tensor_parallel_degrees": (1,)}
    search = SearchSpace(zero_stages=(0,), chunks=(2, 4), offload=(), **degrees)
    intra = IntraStage(model, apply(search, network, 4, 16, devices_per_node=4), memory)
    best = even_chunks(intra, below=np.inf)
    assert max(stage.peak_bytes for stage in best.predicted.stages) <= memory
    assert even_chunks(intra, below=best.predicted.step_seconds * (1 + 1e-9)) == best


def test_the_memory_of_what_reduces_for_too_long_is_not_added_up(monkeypatch):
    search = SearchSpace(zero_stages=(2,), num_microbatches=(8,), num_stages=(2,), tensor_parallel_degrees=(1,))
    best = even_chunks(stages(search, link=1e5), below=np.inf)
    asked, real = [], schedule_variants.plans_peaks
    monkeypatch.setattr(
        schedule_variants, "plans_peaks", lambda model, items: asked.extend(items) or real(model, items)
    )
    assert even_chunks(stages(search, link=1e5), below=best.predicted.step_seconds * 0.2) is None
    assert not asked


def _allowed(plan, space):
    mesh, chunks = plan.stages[0].mesh, plan.num_stages // plan.num_groups
    pairs = [
        (int(plan.stages[0].zero_stage), space.zero_stages if mesh.data_parallel_degree > 1 else (0,)),
        (plan.stages[0].checkpointing.layers, None if space.checkpointing else (0,)),
        (chunks, space.chunks),
        (plan.num_groups, space.num_stages),
        (plan.num_microbatches, space.num_microbatches),
        (mesh.tensor_parallel_degree, space.tensor_parallel_degrees),
        (mesh.data_parallel_degree, space.data_parallel_degrees),
    ]
    return all(allowed is None or value in allowed for value, allowed in pairs)


@pytest.mark.parametrize("pinned", [{"layer_cuts": (4,)}, {"checkpointed_shares": (0, 1)}, {"schedules": ("1f1b",)}])
def test_no_even_chunks_where_layers_or_schedules_are_settled(pinned):
    assert even_chunks(stages(SearchSpace(**pinned)), below=np.inf) is None
