import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import predict, step_seconds
from lightning_mist.cost.inputs.candidates import slots_of
from lightning_mist.errors import InfeasibleError, ProfileError
from lightning_mist.hardware import Link, MixedCluster, catalog_profile, parse_cluster
from lightning_mist.plan import Checkpointing, Plan, StagePlan, ZeroStage, row_slice
from lightning_mist.tuner import Planner, SearchSpace, tune
from lightning_mist.tuner.inter_stage.exact_solver import PRECISION
from lightning_mist.tuner.search.pipelines import Stages, layout_of
from lightning_mist.tuner.space.applied_space import Shape, common_unit
from tests.specs import cluster, profile, spec, with_splits

FAST, SLOW = profile(flops_per_second=4e10, bytes_per_second=4e9, link=4e8), profile()
MIDDLING = profile(flops_per_second=2e10, bytes_per_second=2e9, link=1e8)
SPACE = SearchSpace(schedules=("1f1b",), offload=(), zero_stages=(0, 1))


def machine(*memories, kind="cuda", sizes=(2, 2), link=None):
    parts = tuple(cluster(size, memory=memory, kind=kind) for size, memory in zip(sizes, memories, strict=True))
    return MixedCluster(parts=parts, link=link)


PLENTY = (10**9, 10**9)


def every_plan(network, place, rows, search=SPACE):
    """Every plan whose stages lie in one part each, neighbours together; and those of one stage on all devices."""
    world, layers = place.world_size, network.num_layers
    kinds = [(1, False), *((item.degree, item.sequence_parallel) for item in network.splits)]
    for num_stages in range(1, min(world, layers) + 1):
        kinds_of_parts = range(len(place.parts))
        patterns = [p for p in itertools.product(kinds_of_parts, repeat=num_stages) if is_parted(p, len(place.parts))]
        for parts in [()] if num_stages == 1 else patterns:
            sizes = [place.parts[part].world_size for part in parts] or [world]
            near = [place.parts[part].devices_per_node for part in parts] or [place.devices_per_node]
            shapes = [
                [
                    Shape(data, *kind)
                    for data in range(1, size + 1)
                    for kind in kinds
                    if size % (data * kind[0]) == 0 and kind[0] <= most
                ]
                for size, most in zip(sizes, near, strict=True)
            ]
            for chosen in itertools.product(*shapes):
                yield from plans_of(network, place, rows, parts, chosen, search)


def is_parted(parts, count):
    return len(set(parts)) == count and sum(a != b for a, b in itertools.pairwise(parts)) == count - 1


def plans_of(network, place, rows, parts, shapes, search):
    world, layers, num_stages = place.world_size, network.num_layers, len(shapes)
    wanted = [part.world_size for part in place.parts] if parts else [world]
    used = [0] * len(wanted)
    for shape, part in zip(shapes, parts or (0,), strict=True):
        used[part] += shape.devices
    if used != wanted:
        return
    for count in range(1, rows * world + 1):
        whole = [divmod(count * shape.data, world) for shape in shapes]
        if any(rest or not found or rows % found for found, rest in whole):
            continue
        layout = layout_of(place, [(shape.data, shape.tensor) for shape in shapes], parts or [-1])
        for cuts in itertools.combinations(range(1, layers), num_stages - 1):
            edges = (0, *cuts, layers)
            kept = itertools.product(*(range(end - start + 1) for start, end in itertools.pairwise(edges)))
            zeros = itertools.product(*(search.zero_stages if shape.data > 1 else (0,) for shape in shapes))
            for checkpointed, zero in itertools.product(kept, list(zeros)):
                yield Plan(
                    global_batch_size=rows * world,
                    num_microbatches=count,
                    stages=tuple(
                        StagePlan(
                            layers=(edges[i], edges[i + 1]),
                            mesh=shapes[i].mesh(layout[i]),
                            microbatch_size=rows * world // (count * shapes[i].data),
                            zero_stage=ZeroStage(zero[i]),
                            checkpointing=Checkpointing(layers=checkpointed[i]),
                        )
                        for i in range(num_stages)
                    ),
                )


def priced(stages, plan):
    """Seconds by the closed form, and the largest share of its part's memory that a stage needs."""
    model = stages.model
    slots = slots_of(plan, model.cluster)
    if plan.num_stages > 1:
        least = common_unit(space.least_replicas(plan.num_microbatches) for space in stages.spaces)
        slots = [(replace(slot, replicas=least), one) for slot, one in slots]
    found = [model.seconds(*item) for item in slots]
    peaks = [float(model.memory(slot).peaks(slot, one)[0]) for slot, one in slots]
    shares = [peak / limit for peak, limit in zip(peaks, stages.limits(plan), strict=True)]
    steady, boundary = [item.steady_K[0] for item in found], [item.boundary_K[0] for item in found]
    return step_seconds(steady, boundary, plan.num_microbatches), max(shares)


CASES = {
    "three kinds": (spec(4, tied=True, edge_bytes=400_000), machine(*PLENTY, 10**9, sizes=(1, 2, 1)), 1),
    "alike": (spec(4, tied=True), machine(*PLENTY), 2),
    "two kinds of layers": (spec(3, kinds=(0, 1, 0), widths=(1000, 2500)), machine(*PLENTY, kind="cpu"), 1),
    "slow link": (spec(3), machine(*PLENTY, link=Link(bytes_per_second=3e6, latency_seconds=1e-3)), 2),
    "uneven": (spec(3, edge_bytes=400_000), machine(*PLENTY, sizes=(2, 1)), 2),
    "split": (with_splits(spec(2), (2, False), (2, True)), machine(*PLENTY), 2),
    "little memory": (spec(3, edge_bytes=400_000), machine(2_800_000, 3_010_000), 2),
    "less memory": (spec(3, tied=True), machine(720_000, 1_010_000, kind="cpu"), 2),
}
"""Network, machine, and rows of the batch of each device."""


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("profiles", [(FAST, SLOW), (SLOW, FAST)], ids=["fast first", "slow first"])
def test_no_plan_is_faster(name, profiles):
    network, place, rows = CASES[name]
    planner = Planner(network, place, profile=(*profiles, MIDDLING)[: len(place.parts)])
    stages = Stages(planner.model, planner.space(rows * place.world_size, SPACE))
    every = [priced(stages, plan) for plan in every_plan(network, place, rows)]
    fitting = [seconds for seconds, share in every if share <= 1]
    assert len(fitting) > 10
    assert ("memory" in name) == (len(fitting) < len(every))
    found = planner.tune(global_batch_size=rows * place.world_size, search=SPACE)
    least = min(fitting)
    assert found.bound == pytest.approx(least, rel=10 * PRECISION)
    assert found.gap <= 10 * PRECISION
    assert found.closed_form_seconds >= least * (1 - PRECISION)
    assert priced(stages, found.plan)[0] == pytest.approx(found.closed_form_seconds, rel=PRECISION)


def test_stages_lie_where_they_are_best_in_either_order():
    """The tail alone computes much, so the last stage belongs to the fast devices, wherever they come in the list."""
    network = spec(4)
    for profiles, last in (((FAST, SLOW), (0, 1)), ((SLOW, FAST), (2, 3))):
        search = replace(SPACE, num_stages=(2,), devices_per_stage=(2,))
        found = tune(network, machine(*PLENTY), profile=profiles, global_batch_size=8, search=search)
        first, second = found.plan.stages
        assert second.devices == last
        assert second.num_layers > first.num_layers


def test_equal_parts_take_what_one_machine_takes():
    whole, halves = parse_cluster("2x2xL4"), MixedCluster(parts=(parse_cluster("2xL4"), parse_cluster("2xL4")))
    network = spec(4, parameter_bytes=400_000_000, widths=(20_000_000,))
    search = replace(SPACE, num_stages=(2, 4), devices_per_stage=(1, 2))
    one, two = (tune(network, place, global_batch_size=16, search=search) for place in (whole, halves))
    assert two.predicted.step_seconds == pytest.approx(one.predicted.step_seconds, rel=1e-9)
    assert two.plan.num_stages == one.plan.num_stages


@pytest.mark.parametrize("part", [0, 1])
def test_a_faster_part_never_makes_the_plan_slower(part):
    before = tune(spec(4), machine(*PLENTY), profile=(SLOW, SLOW), global_batch_size=8, search=SPACE)
    profiles = (FAST, SLOW) if part == 0 else (SLOW, FAST)
    after = tune(spec(4), machine(*PLENTY), profile=profiles, global_batch_size=8, search=SPACE)
    assert after.bound < before.bound


def test_more_memory_of_a_part_never_makes_the_plan_slower():
    network, _, _ = CASES["little memory"]
    found = [
        tune(network, machine(*memories), profile=(FAST, SLOW), global_batch_size=8, search=SPACE).bound
        for memories in ((2_800_000, 3_010_000), (2_900_000, 3_010_000), (2_900_000, 6_000_000), PLENTY)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_plans_run_as_the_rows_demand():
    """Ranks of a replica lie in several parts, and every part of a microbatch is of one batch."""
    found = tune(spec(4), machine(*PLENTY), profile=(FAST, SLOW), global_batch_size=16, search=SPACE)
    seen = sorted(
        (piece.owner, piece.part, piece.parts)
        for rank in found.plan.stages[-1].devices
        for microbatch in range(found.plan.num_microbatches)
        for piece in [row_slice(found.plan, rank, microbatch)]
    )
    assert len(set(seen)) == len(seen)
    assert {owner for owner, _, _ in seen} == {0, 1, 2, 3}


def test_ranks_are_those_of_the_part():
    place = machine(*PLENTY, sizes=(2, 4))
    assert layout_of(place, [(2, 1), (1, 2), (2, 1)], [1, 0, 1]) == ((4, 5), (0, 1), (2, 3))
    assert layout_of(place, [(6, 1)], [-1]) == ((0, 1, 2, 3, 4, 5),)


def test_other_schedules_are_tried():
    search = SearchSpace(schedules=("zb-h1",), offload=())
    found = tune(spec(4), machine(*PLENTY), profile=(FAST, SLOW), global_batch_size=16, search=search)
    assert found.plan.schedule == "zb-h1"
    assert found.status == "explored"


def test_what_does_not_fit_says_on_which_devices():
    network = spec(4, edge_bytes=40_000_000)
    place = MixedCluster(parts=(parse_cluster("2xA100-40:100MB"), parse_cluster("2xL4:50MB")))
    with pytest.raises(
        InfeasibleError, match=r"on stage \d of \d \(.* on \d (A100-40|L4), .*memory_limit is .* per device"
    ):
        tune(network, place, global_batch_size=8, search=SPACE)


def test_limits_are_each_part_s_own():
    found = tune(spec(4), parse_cluster("2xA100-40+2xL4"), global_batch_size=8, search=SPACE)
    text = "\n".join(found.notes)
    assert "31.5 GiB per device, 80% of the memory of A100-40" in text
    assert "18.0 GiB per device, 80% of the memory of L4" in text
    asked = tune(spec(4), parse_cluster("2xA100-40+2xL4"), global_batch_size=8, memory_limit=30 * 2**30, search=SPACE)
    assert "tensors may take 24.0 GiB per device" in "\n".join(asked.notes)


def test_what_is_ruled_out_on_a_part_is_said():
    """The whole has no two devices of a node everywhere, so that of it nothing is to be said."""
    found = tune(spec(4), parse_cluster("1x2xA100-40+1xL4"), global_batch_size=3, search=SPACE)
    assert [note for note in found.notes if "tensor parallelism" in note] == [
        "on 1x2xA100-40 without tensor parallelism: how its layers could be split is not known"
    ]


def test_a_profile_is_of_one_part():
    place = parse_cluster("2xA100-40+2xL4")
    with pytest.raises(ProfileError, match=r"1 profile .* for the 2 parts"):
        tune(spec(4), place, profile=catalog_profile(place.parts[0]), global_batch_size=8)


def test_predictions_of_plans_are_those_of_the_cost_model():
    place = machine(*PLENTY)
    found = tune(spec(4), place, profile=(FAST, SLOW), global_batch_size=8, search=SPACE)
    assert found.predicted == predict(spec(4), (FAST, SLOW), place, found.plan)
    assert np.isfinite(found.bound)
