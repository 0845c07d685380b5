import itertools
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
import pytest

from lightning_mist.cost import StageCostModel, predict_with, step_seconds
from lightning_mist.plan import OffloadRatios
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.select import schedule_variants
from lightning_mist.tuner.select.equal_stages import UniformPlans, even_chunks, fastest_uniform
from lightning_mist.tuner.space.applied_space import SearchSpace, Shape, apply, divisors
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
OFFLOADS = (OffloadRatios(optimizer=1.0), OffloadRatios(optimizer=1.0, gradients=1.0))
DEVICES, ROWS = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with stages that are all alike, in words of what they have."""

    zero_stages: tuple[int, ...]
    has_stages: bool = False
    recomputes: str = "best"
    cuts_batches: bool = True
    has_chunks: bool = False
    offloads: tuple[OffloadRatios, ...] = (OffloadRatios(),)
    offloads_if_all_recomputed: tuple[OffloadRatios, ...] = ()

    @property
    def plans(self):
        """The same for the planner."""
        search = SearchSpace(
            equal_stages=True,
            num_stages=None if self.has_stages else (1,),
            tensor_parallel_degrees=None if self.has_stages else (1,),
            num_microbatches=None if self.cuts_batches else (1,),
            zero_stages=self.zero_stages,
            checkpointing=self.recomputes != "none",
            checkpointed_shares=(1.0,) if self.recomputes == "all" else None,
            offload=(),
            schedules=("1f1b", "interleaved-1f1b") if self.has_chunks else ("1f1b",),
        )
        more = self.offloads_if_all_recomputed
        return UniformPlans(search=search, offloads=self.offloads, offloads_if_all_recomputed=more)


GRID = Family(zero_stages=(0, 1), has_stages=True, has_chunks=True)


def fastest(family, network=NETWORK, memory=np.inf, host=np.inf):
    """The fastest plan of a family, and what is missing."""
    plans = family.plans
    space = apply(plans.search, network, DEVICES, ROWS * DEVICES, devices_per_node=DEVICES)
    model = StageCostModel(network, MACHINE, cluster(DEVICES, kind="cuda"))
    return fastest_uniform(IntraStage(model, space, memory, host_limit=host), plans)


def alike(stages, microbatches, shape, checkpointed, zero, offload=None, chunks=1):
    layout, count = rank_layout([(shape.data, shape.tensor)] * stages), 8 // (stages * chunks)
    kept = {"layers": count, "zero": zero, "checkpointed": checkpointed, "offload": asdict(offload or OffloadRatios())}
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
    kinds = [(1, False), (2, False), (2, True), (4, False), (4, True)] if family.has_stages else [(1, False)]
    counts = divisors(DEVICES) if family.has_stages else (1,)
    for stages, (tensor, sequence), part in itertools.product(counts, kinds, divisors(ROWS)):
        if DEVICES % (stages * tensor) or (part > 1 and not family.cuts_batches):
            continue
        shape, microbatches = Shape(DEVICES // (stages * tensor), tensor, sequence), part * stages * tensor
        for chunks in (1, 2, 4) if family.has_chunks and stages > 1 else (1,):
            count = 8 // (stages * chunks)
            if chunks * stages > 8 or microbatches % stages:
                continue
            recomputed = {"none": [0], "all": [count], "best": range(count + 1)}[family.recomputes]
            zeros = family.zero_stages if shape.data > 1 else (0,)
            for checkpointed, zero in itertools.product(recomputed, zeros):
                more = family.offloads_if_all_recomputed if checkpointed == count else ()
                for offload in (*family.offloads, *more):
                    yield alike(stages, microbatches, shape, checkpointed, zero, offload, chunks)


def peak(plan):
    return max(stage.peak_bytes for stage in plan.predicted.stages)


def closed_form(plan):
    stages = plan.predicted.stages
    times = ([stage.steady_seconds for stage in stages], [stage.boundary_seconds for stage in stages])
    return step_seconds(*times, plan.num_microbatches)


ONE_STAGE = [
    Family(zero_stages=(0,), recomputes="none", cuts_batches=False),
    Family(zero_stages=(0,), recomputes="all"),
    Family(zero_stages=(2, 3)),
    Family(zero_stages=(2, 3), offloads=OFFLOADS),
    Family(
        zero_stages=(3,),
        offloads=(OffloadRatios(optimizer=1.0, parameters=1.0),),
        offloads_if_all_recomputed=(OffloadRatios(optimizer=1.0, parameters=1.0, activations=1.0),),
    ),
]


@pytest.mark.parametrize("family", ONE_STAGE)
def test_one_stage_is_the_best_of_all(family):
    every = sorted(everything(family), key=peak)
    # Without a limit, with one that half of the plans keep, and with one that none does.
    for limit in (np.inf, peak(every[len(every) // 2]), peak(every[0]) - 1):
        plan, short = fastest(family, memory=limit)
        fitting = [plan for plan in every if peak(plan) <= limit]
        if not fitting:
            assert plan is None
            assert (short.needed_bytes, short.limit_bytes, short.is_host) == (peak(every[0]), limit, False)
            continue
        assert plan.predicted.step_seconds == pytest.approx(
            min(plan.predicted.step_seconds for plan in fitting), rel=1e-12
        )
        assert plan in fitting


@pytest.mark.parametrize("recomputes", ["none", "all", "best"])
def test_a_grid_is_as_fast_as_the_best_by_the_closed_form_and_as_any_with_chunks(recomputes):
    family = replace(GRID, recomputes=recomputes)
    every = sorted(everything(family), key=peak)
    used = set()
    for limit in (np.inf, *(peak(every[int(part * (len(every) - 1))]) for part in (0.75, 0.5, 0.25, 0.0))):
        found, _ = fastest(family, memory=limit)
        fitting = [plan for plan in every if peak(plan) <= limit]
        assert found in fitting
        used.add(found.schedule)
        whole = [plan for plan in fitting if plan.schedule == "1f1b"]
        chunked = [plan for plan in fitting if plan.schedule != "1f1b"]
        rivals = sorted(whole, key=closed_form)[:1] + chunked
        assert found.predicted.step_seconds <= min(plan.predicted.step_seconds for plan in rivals) * (1 + 1e-12)
    assert used == {"1f1b", "interleaved-1f1b"}


def test_chunks_shorten_a_bubble():
    (whole, _), (chunked, _) = fastest(replace(GRID, has_chunks=False)), fastest(GRID)
    assert (whole.schedule, chunked.schedule) == ("1f1b", "interleaved-1f1b")
    assert chunked.predicted.step_seconds < whole.predicted.step_seconds


def test_host_memory_is_a_limit():
    family = Family(zero_stages=(2, 3), offloads=OFFLOADS)
    plan, short = fastest(family, host=0)
    assert plan is None
    assert short.is_host
    assert (short.needed_bytes, short.missing) == (short.missing, short.needed_bytes)
    plan, _ = fastest(family, host=short.needed_bytes)
    assert plan.stages[0].offload == OFFLOADS[0]
    _, less = fastest(family, host=short.needed_bytes - 1)
    assert less.missing == 1


def test_stages_have_equally_many_layers():
    # 6 layers cannot be dealt out to 4 equal stages.
    for limit in (np.inf, 1_400_000, 1_100_000):
        found, _ = fastest(replace(GRID, has_chunks=False), spec(6, measured=True), memory=limit)
        assert found is None or found.num_stages in (1, 2)


def test_what_a_module_does_not_allow():
    network = spec(4, measured=True, exclusions=[("pipeline", "x"), ("checkpointing", "y"), ("microbatches", "z")])
    plan, _ = fastest(GRID, network)
    assert (plan.num_stages, plan.num_microbatches, plan.stages[0].checkpointing.layers) == (1, 1, 0)


def test_where_nothing_divides_the_batch_nothing_is_missing():
    network = spec(4, measured=True, exclusions=[("pipeline", "x")])
    plans = UniformPlans(search=replace(GRID.plans.search, num_stages=(2,)))
    space = apply(plans.search, network, DEVICES, ROWS * DEVICES, devices_per_node=DEVICES)
    assert fastest_uniform(IntraStage(MODEL, space, np.inf), plans) == (None, None)


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
