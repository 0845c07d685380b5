import itertools
from dataclasses import replace
from math import gcd

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, StageMesh, StagePlan, row_slice
from lightning_mist.plan.grid import rank_layout
from lightning_mist.tuner import SearchSpace, degrees_to_try
from lightning_mist.tuner.space.applied_space import Shape, apply, divisors
from tests.specs import spec, with_splits
from tests.tuner.instances import traced


def space(layers=4, devices=4, rows=4, *, exclusions=(), **search):
    limits = {"tensor_parallel_degrees": (1,), **search}
    return apply(SearchSpace(**limits), spec(layers, exclusions=exclusions), devices, rows * devices)


def brute_force(layers, devices, rows, tensor=(1,), loaders=None):
    """Numbers of stages and microbatches for which some plan of so many rows obeys every rule."""
    found = set()
    every = [(count // t, t) for count in divisors(devices) for t in tensor if count % t == 0]
    for num_stages in range(1, min(layers, devices) + 1):
        for degrees in itertools.product(every, repeat=num_stages):
            if sum(data * t for data, t in degrees) != devices:
                continue
            for count in range(1, rows + 1):
                if rows % count == 0 and is_allowed(degrees, devices, rows, count, loaders):
                    found.add((num_stages, count))
    return found


def is_allowed(degrees, devices, rows, count, loaders):
    stages = []
    for index, (degree, ranks) in enumerate(zip(degrees, rank_layout(degrees), strict=True)):
        size, rest = divmod(rows, degree[0] * count)
        if rest:
            return False
        mesh = StageMesh(devices=ranks, data_parallel_degree=degree[0], tensor_parallel_degree=degree[1])
        stages.append(StagePlan(layers=(index, index + 1), mesh=mesh, microbatch_size=size))
    loaders = loaders or (devices if rows % devices == 0 else gcd(*(degree for degree, _ in degrees)))
    given = None if loaders == devices else loaders
    try:
        plan = Plan(global_batch_size=rows, num_microbatches=count, stages=tuple(stages), data_parallel_size=given)
        slices = [row_slice(plan, rank, 0) for rank in range(devices)]
    except PlanError:
        return False
    return all(rows // loaders % item.parts == 0 for item in slices)


@pytest.mark.parametrize(("layers", "devices", "rows"), [(4, 4, 4), (3, 4, 6), (6, 6, 2), (2, 3, 4), (1, 4, 3)])
def test_pipelines_are_those_that_the_rules_of_plans_allow(layers, devices, rows):
    assert set(space(layers, devices, rows).pipelines()) == brute_force(layers, devices, rows * devices)


@pytest.mark.parametrize(("layers", "devices", "rows"), [(4, 4, 6), (4, 4, 7), (3, 6, 8), (6, 6, 4), (1, 4, 2)])
def test_a_batch_that_not_every_device_has_a_part_of_is_that_of_as_many_loaders_as_copies(layers, devices, rows):
    network = with_splits(spec(layers), (2, False))
    found = apply(SearchSpace(), network, devices, rows)
    assert set(found.pipelines()) == brute_force(layers, devices, rows, tensor=(1, 2))
    assert (found.loaders([4, 2]), found.loaders([1, 3]), found.batch_rows(2)) == (2, 1, rows // 2)


@pytest.mark.parametrize("loaders", [1, 2, 4])
def test_parts_are_of_one_of_the_given_number_of_loaders(loaders):
    found = apply(SearchSpace(data_parallel_size=loaders, tensor_parallel_degrees=(1,)), spec(4), 4, 8)
    assert set(found.pipelines()) == brute_force(4, 4, 8, loaders=loaders)
    assert found.loaders([4]) == (None if loaders == 4 else loaders)
    assert found.replicas([4]) == loaders


def test_batches_that_may_not_be_cut_are_computed_on_by_the_copy_that_loads_them():
    uncut = spec(4, exclusions=(("microbatches", "batch norm"),))
    found = apply(SearchSpace(data_parallel_size=2, tensor_parallel_degrees=(1,)), uncut, 4, 8)
    assert set(found.pipelines()) == {(2, 1), (4, 2)}
    with pytest.raises(PlanError, match=r"10 on 4 devices: batches may not be cut \(batch norm\).*use 8 rows"):
        apply(SearchSpace(), uncut, 4, 10)


@pytest.mark.parametrize(("layers", "devices", "rows"), [(3, 4, 2), (2, 6, 2)])
def test_tensor_parallel_devices_load_batches_that_others_share(layers, devices, rows):
    network = with_splits(spec(layers), (2, False), (2, True))
    found = apply(SearchSpace(tensor_parallel_degrees=None), network, devices, rows * devices)
    assert found.tensor == ((1, False), (2, False), (2, True))
    assert set(found.pipelines()) == brute_force(layers, devices, rows * devices, tensor=(1, 2))
    # Two ranks that share every layer compute on two batches, one after the other.
    alone = apply(SearchSpace(tensor_parallel_degrees=(2,)), network, 2, 2)
    assert alone.pipelines() == ((1, 2),)
    assert alone.shapes(2) == (Shape(1, 2, False), Shape(1, 2, True))


def kinds_and_notes(*splits, exclusions=(), devices_per_node=8, **search):
    network = with_splits(spec(4, exclusions=exclusions), *splits)
    limits = SearchSpace(**{"tensor_parallel_degrees": None, **search})
    found = apply(limits, network, 24, 24, devices_per_node=devices_per_node)
    return found.tensor, found.notes


def test_why_layers_are_not_split_is_said():
    assert kinds_and_notes(exclusions=[("tensor", "no linear layers")]) == (
        ((1, False),),
        ("without tensor parallelism: no linear layers",),
    )
    kinds, notes = kinds_and_notes((2, False), exclusions=[("sequence", "it pools")])
    assert kinds == ((1, False), (2, False))
    assert notes == (
        "without tensor_parallel_degree 4, 8: they do not divide what would be split",
        "without sequence parallelism: it pools",
    )
    assert kinds_and_notes((2, False), tensor_parallel_degrees=(1,)) == (((1, False),), ())
    every = [(2, False), (2, True)]
    assert kinds_and_notes(*every, tensor_parallel_degrees=(2,), sequence_parallel=True)[0] == ((2, True),)
    assert kinds_and_notes(*every, tensor_parallel_degrees=(1, 2), sequence_parallel=False) == (
        ((1, False), (2, False)),
        (),
    )


def test_the_reason_of_each_degree_is_said():
    network = with_splits(spec(4), (2, False))
    network = replace(
        network, module_map=replace(network.module_map, unsplit=((4, "2 heads, which 4 does not divide"),))
    )
    found = apply(
        SearchSpace(tensor_parallel_degrees=None, sequence_parallel=False), network, 24, 24, devices_per_node=8
    )
    assert found.notes == (
        "without tensor_parallel_degree 4: 2 heads, which 4 does not divide",
        "without tensor_parallel_degree 8: they do not divide what would be split",
    )


def test_degrees_of_one_search_divide_each_other():
    kinds, notes = kinds_and_notes((2, False), (3, False), (6, False), devices_per_node=6, sequence_parallel=False)
    assert kinds == ((1, False), (3, False), (6, False))
    assert notes == ("without tensor_parallel_degree 2: degrees of one plan must divide each other",)


def test_whole_batches_only():
    found = space(exclusions=[("microbatches", "a batch norm")])
    # Every microbatch is one rank's batch: as many as there are ranks in a replica.
    assert found.pipelines() == ((1, 1), (2, 2), (4, 4))
    assert found.notes == ("without cutting a batch into microbatches: a batch norm",)


def test_what_a_module_cannot_do_is_ruled_out_with_its_reason():
    found = space(exclusions=[("pipeline", "an .item()"), ("checkpointing", "side effects"), ("pipeline", "a loop")])
    assert {stages for stages, _ in found.pipelines()} == {1}
    assert not found.checkpointing
    assert found.notes == (
        "without several pipeline stages: an .item(); a loop",
        "without activation checkpointing: side effects",
    )


@pytest.mark.parametrize(
    ("features", "left", "notes"),
    [
        (["sharded_parameters"], (0, 1, 2), ("without ZeRO-3: an average",)),
        (["sharded_gradients"], (0,), ("without ZeRO: an average",)),
        (["sharded_gradients", "sharded_parameters"], (0,), ("without ZeRO: an average",)),
        (["sharded_parameters", "pipeline"], (0, 1, 2), ("without several pipeline stages, ZeRO-3: an average",)),
    ],
)
def test_sharding_that_is_ruled_out_is_not_searched(features, left, notes):
    exclusions = [(feature, "an average") for feature in features]
    found = space(exclusions=exclusions)
    assert found.search.zero_stages == left
    assert found.notes == notes
    with pytest.raises(PlanError, match=f"an average. Allow zero_stages up to {left[-1]}"):
        space(exclusions=exclusions, zero_stages=(3,))


def test_a_module_without_blocks_is_data_parallel():
    found = space(0)
    assert found.pipelines() == ((1, 1), (1, 2), (1, 4))
    assert not found.checkpointing
    assert "no repeated blocks" in found.notes[0]


def test_limits_are_kept():
    found = space(8, 8, 4, max_stages=4, num_stages=(1, 4, 8), num_microbatches=(2, 4, 8), devices_per_stage=(2, 8))
    assert found.pipelines() == ((1, 2), (1, 4), (4, 4), (4, 8))
    assert found.shapes(4) == (Shape(2), Shape(8))


def test_the_exact_search_is_about_the_schedule_that_has_a_closed_form():
    assert space().schedule == "1f1b"
    assert space(schedules=("gpipe",)).schedule == "gpipe"
    assert space(schedules=("gpipe", "1f1b")).schedule == "1f1b"
    assert space(schedules=("zb-h1",)).schedule == "1f1b"


def test_a_batch_must_be_a_multiple_of_the_loaders_and_these_a_divisor_of_the_devices():
    with pytest.raises(PlanError, match=r"global_batch_size = 10 with data_parallel_size = 4.*use 8"):
        apply(SearchSpace(data_parallel_size=4), spec(4), 4, 10)
    with pytest.raises(PlanError, match=r"data_parallel_size = 3 on 4 devices.*must divide 4"):
        apply(SearchSpace(data_parallel_size=3), spec(4), 4, 12)
    with pytest.raises(PlanError, match=r"global_batch_size = 0 .*use 1"):
        apply(SearchSpace(), spec(4), 4, 0)


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"max_stages": 0}, "max_stages=0"),
        ({"num_stages": ()}, "num_stages"),
        ({"num_microbatches": (0,)}, "num_microbatches"),
        ({"zero_stages": (4,)}, "zero_stages"),
        ({"data_parallel_size": 0}, "at least 1 batch"),
        ({"tensor_parallel_degrees": (0,)}, "tensor_parallel_degrees"),
        ({"schedules": ("zigzag",)}, "known are 1f1b, gpipe, interleaved-1f1b, zb-h1"),
        ({"schedules": ()}, "give at least one"),
        ({"solver_seconds": 0.0}, "solver_seconds"),
    ],
)
def test_wrong_limits_are_refused(argument, match):
    with pytest.raises(ValueError, match=match):
        SearchSpace(**argument)


@pytest.mark.parametrize("degrees", [(2, 2), (1, 1, 2), (4,)])
def test_the_least_number_of_replicas_is_no_more_than_that_of_a_plan(degrees):
    found = space(4, 4, 4)
    for num_stages, count in found.pipelines():
        if num_stages == len(degrees) and all(Shape(degree) in found.shapes(count) for degree in degrees):
            assert found.least_replicas(count) <= gcd(*degrees)


def test_degrees_to_try_divide_a_node_and_were_asked_for():
    everything = SearchSpace(tensor_parallel_degrees=None)
    assert degrees_to_try(everything, 1) == ()
    assert degrees_to_try(everything, 12) == (2, 3, 4, 6)
    assert degrees_to_try(everything, 16) == (2, 4, 8)
    assert degrees_to_try(SearchSpace(tensor_parallel_degrees=(1, 4)), 8) == (4,)
    assert degrees_to_try(SearchSpace(tensor_parallel_degrees=(1,)), 8) == ()


def test_degrees_above_a_node_are_tried_only_where_they_are_named_and_fill_nodes():
    assert degrees_to_try(SearchSpace(tensor_parallel_degrees=(8, 12, 16)), 8) == (8, 16)
    splits = [(2, False), (8, False), (16, False)]
    assert kinds_and_notes(*splits)[0] == ((1, False), (2, False), (8, False))
    assert kinds_and_notes(*splits, tensor_parallel_degrees=(8, 16))[0] == ((8, False), (16, False))


def test_the_last_stage_alone_may_cut_what_is_behind_its_layers():
    asked, network = SearchSpace(tail_chunks=(2, 4)), traced(3)
    assert {shape.method.tail_chunks for shape in apply(asked, network, 2, 8).shapes_at(1, 2, 8)} == {2, 4}
    space = apply(asked, replace(network, module_map=network.module_map.excluding("it pools", "tail_tokens")), 2, 8)
    chunks = {stage: {shape.method.tail_chunks for shape in space.shapes_at(stage, 2, 1)} for stage in range(2)}
    assert chunks == {0: {1}, 1: {2, 4}}
    assert {shape.method.tail_chunks for shape in space.shapes_at(1, 2, 4)} == {2}
    assert not space.shapes_at(1, 2, 8)
    for network, why in (
        (spec(3), "what that costs is not known for"),
        (replace(traced(3), module_map=traced(3).module_map.excluding("it pools", "tail_chunks")), "it pools"),
    ):
        without = apply(asked, network, 2, 8)
        assert without.tail_chunks == (1,)
        assert any(note.startswith("without chunks behind the last layer: ") and why in note for note in without.notes)
