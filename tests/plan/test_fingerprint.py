from dataclasses import replace

import pytest
from hypothesis import given

from lightning_mist.errors import PlanError
from lightning_mist.plan import (
    Exclusion,
    ModuleMap,
    ParameterUse,
    check_plan,
    differences,
    fingerprint_of,
)
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit, TensorSplit
from tests.plans import plan_of, plans


def use(name, region, shape=(2, 3), dtype="float32"):
    owner, _, attribute = name.rpartition(".")
    return ParameterUse(name=name, slots=((owner, attribute, (region,)),), shape=shape, dtype=dtype, requires_grad=True)


def module_map(num_layers=3, *, exclusions=(), widths=None):
    blocks = tuple(f"net.h.{index}" for index in range(num_layers))
    widths = widths or [3] * num_layers
    parameters = [use("net.embed.weight", -1, shape=(7, 3))]
    parameters += [use(f"net.h.{index}.fc.weight", index, shape=(2, width)) for index, width in enumerate(widths)]
    return ModuleMap(
        step="training_step",
        blocks=blocks,
        cuts=(),
        parameters=tuple(parameters),
        exclusions=tuple(exclusions),
    )


def make_plan(*, stages=2, degree=1, num_microbatches=2, microbatch_size=2, checkpointed=0, zero=0):
    stage = {"data": degree, "checkpointed": checkpointed, "zero": zero}
    return plan_of(microbatch_size * degree * num_microbatches, num_microbatches, *[stage] * stages)


def fit(plan, **changes):
    found = changes.pop("module_map", None) or module_map(plan.num_layers)
    arguments = {
        "world_size": plan.world_size,
        "batch_rows": plan.global_batch_size // plan.num_loaders,
        "data_parallel_size": plan.data_parallel_size,
        "num_layers": len(found.blocks),
        "module_map": found,
    }
    check_plan(plan, **{**arguments, **changes})


def made(**changes):
    arguments = {"world_size": 4, "batch_rows": 8, "precision": "bf16-mixed", "versions": [("torch", "2.6.0")]}
    return fingerprint_of(module_map(changes.pop("num_layers", 3)), **{**arguments, **changes})


def test_fingerprint_of_a_module():
    found = dict(made())
    assert (found["num_layers"], found["layer_kinds"], found["num_parameters"]) == ("3", "3A", str(21 + 3 * 6))
    assert len(found["parameters_hash"]) == 16
    assert made()[0] == ("world_size", "4")
    assert made()[-1] == ("version.torch", "2.6.0")


def test_layer_kinds_tell_blocks_apart_by_their_parameters():
    found = fingerprint_of(module_map(4, widths=[3, 3, 5, 3]), world_size=1, batch_rows=None, precision="32-true")
    assert dict(found)["layer_kinds"] == "2A 1B 1A"
    assert "batch_rows" not in dict(found)


def test_hash_sees_names_shapes_and_element_types():
    base = module_map()
    changed = [
        replace(base, parameters=(*base.parameters[:-1], replace(base.parameters[-1], **change)))
        for change in ({"name": "other"}, {"shape": (3, 2)}, {"dtype": "bfloat16"})
    ]
    hashes = {
        dict(fingerprint_of(found, world_size=1, batch_rows=1, precision="32-true"))["parameters_hash"]
        for found in (base, *changed)
    }
    assert len(hashes) == 4


def test_differences_as_text():
    assert differences(made(), made()) == ()
    other = made(world_size=8, num_layers=2, precision="32-true", versions=[("torch", "2.13.0"), ("python", "3.10")])
    assert [line for line in differences(made(), other) if "hash" not in line] == [
        "world_size: the plan was made for 4, here it is 8",
        "num_layers: the plan was made for 3, here it is 2",
        "layer_kinds: the plan was made for 3A, here it is 2A",
        "num_parameters: the plan was made for 39, here it is 33",
        "precision: the plan was made for bf16-mixed, here it is 32-true",
        "torch: the plan was made with version 2.6.0, here it is 2.13.0",
    ]


def test_what_a_plan_leaves_open_is_no_difference():
    assert differences((("later_key", "x"),), made()) == ()


def test_a_number_that_is_none_is_refused():
    with pytest.raises(PlanError, match=r"fingerprint\.world_size = 'four': digits are needed"):
        differences((("world_size", "four"),), made())


@given(plans(fewer_loaders=True))
def test_every_runnable_plan_fits_what_it_was_made_for(plan):
    fit(plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 3}, "the plan is for 2 devices, but 3 processes run"),
        ({"data_parallel_size": 1}, "the plan is for batches of 2 data loaders, but there are 1"),
        ({"num_layers": 5}, "the plan spreads 2 layers, but the module has 5 repeated blocks"),
        ({"batch_rows": 3}, "global_batch_size 4, but 2 ranks load batches of 3 rows, 6 in all: .* use batch_size=2"),
    ],
)
def test_a_plan_for_something_else_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        fit(make_plan(), **changes)


def test_why_no_blocks_were_found_is_said():
    reasons = [Exclusion(feature="pipeline", reason="the step reads a value")]
    with pytest.raises(PlanError, match=r"has 0 repeated blocks \(the step reads a value\): the numbers"):
        fit(make_plan(), num_layers=0, module_map=module_map(0, exclusions=reasons))


def test_parts_that_mix_two_batches_are_refused():
    plan = make_plan(stages=2, num_microbatches=3, microbatch_size=2)
    with pytest.raises(PlanError, match="a part may not mix two batches"):
        fit(plan)


def test_batches_without_rows_are_not_cut():
    fit(make_plan(num_microbatches=2), batch_rows=None)
    with pytest.raises(PlanError, match="cuts every batch into 2 parts, but this batch has no common first dimension"):
        fit(make_plan(num_microbatches=4), batch_rows=None)


@pytest.mark.parametrize(
    ("feature", "plan", "message"),
    [
        ("pipeline", make_plan(stages=2), "the plan has 2 stages, which this module rules out: because; use one stage"),
        ("microbatches", make_plan(num_microbatches=4), "has batches cut into 2 parts, which .*: because; keep whole"),
        ("checkpointing", make_plan(checkpointed=1), "has checkpointed_layers of 1, 1, which .*: because; use"),
        ("sharded_gradients", make_plan(zero=1), "has zero_stage of 1, 1, which .*: because; use zero_stage = 0 on ev"),
        ("sharded_gradients", make_plan(zero=3), "has zero_stage of 3, 3, which .*: because; use zero_stage = 0 on ev"),
        ("sharded_parameters", make_plan(zero=3), "zero_stage of 3, 3, which .*: because; use zero_stage = 2 or less"),
    ],
)
def test_what_the_module_excludes_is_refused(feature, plan, message):
    reasons = [Exclusion(feature=feature, reason="because")]
    with pytest.raises(PlanError, match=message):
        fit(plan, module_map=module_map(2, exclusions=reasons))


def test_what_the_module_excludes_does_not_touch_other_plans():
    features = ("pipeline", "microbatches", "checkpointing", "sharded_gradients", "sharded_parameters")
    reasons = [Exclusion(feature=name, reason="because") for name in features]
    fit(make_plan(stages=1, degree=2, num_microbatches=1), module_map=module_map(1, exclusions=reasons))


def test_what_stays_allowed_beside_sharded_parameters():
    reasons = [Exclusion(feature="sharded_parameters", reason="because")]
    fit(make_plan(zero=2), module_map=module_map(2, exclusions=reasons))


def shared_plan(degree=2, *, sequence=False):
    return plan_of(2 * degree, degree, {"layers": 3, "tensor": degree, "sequence": sequence})


SPLIT = TensorSplit(
    degree=2,
    parameters=(ParameterSplit(name="net.h.0.fc.weight", dim=0, factors=((2, True),)),),
    sequence=(SequenceSplit(position=0, leaf=0, dim=1),),
)


def test_a_degree_that_was_checked_may_share_layers():
    found = replace(module_map(), splits=(SPLIT,))
    fit(shared_plan(), module_map=found)
    fit(shared_plan(sequence=True), module_map=found)


@pytest.mark.parametrize(
    ("degree", "changes", "message"),
    [
        (
            3,
            {"splits": (SPLIT,), "unsplit": ((3, "4 heads, which 3 does not divide"),)},
            r"stages\[0\]\.tensor_parallel_degree = 3: 4 heads, which 3 does not divide; "
            r"use tensor_parallel_degree = 1 or 2$",
        ),
        (2, {}, r"it was not shown that 2 devices that share layers compute the same; use tensor_parallel_degree = 1$"),
        (2, {"exclusions": (Exclusion(feature="tensor", reason="batch norm"),)}, "= 2: batch norm; use .* = 1$"),
    ],
)
def test_a_degree_that_was_not_shown_to_compute_the_same_is_refused(degree, changes, message):
    with pytest.raises(PlanError, match=message):
        fit(shared_plan(degree), module_map=replace(module_map(), **changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"exclusions": (Exclusion(feature="sequence", reason="no sequence"),)}, "no sequence"),
        ({"splits": (replace(SPLIT, sequence=(), notes=("the sequence has 7 positions",)),)}, "has 7 positions"),
        ({}, "this module was not shown to compute the same with it"),
    ],
)
def test_parts_of_sequences_that_were_not_shown_to_compute_the_same_are_refused(changes, why):
    found = replace(module_map(), **{"splits": (replace(SPLIT, sequence=()),), **changes})
    fit(shared_plan(), module_map=found)
    with pytest.raises(
        PlanError, match=rf"stages\[0\]\.sequence_parallel = True: .*{why}; use sequence_parallel=False"
    ):
        fit(shared_plan(sequence=True), module_map=found)
