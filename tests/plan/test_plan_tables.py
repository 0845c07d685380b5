from dataclasses import replace

from hypothesis import given

from lightning_mist.plan import (
    Checkpointing,
    ModuleMap,
    OffloadRatios,
    ParameterUse,
    Plan,
    Predicted,
    PredictedStage,
    StageMesh,
    StagePlan,
    TensorSplit,
    ZeroStage,
    describe_changes,
    render,
    split_notes,
)
from tests.plans import plan_of, plans


def stage(layers, devices, **changes):
    arguments = {"microbatch_size": 8 // len(devices), "zero_stage": ZeroStage.OPTIMIZER}
    mesh = StageMesh(devices=tuple(devices), data_parallel_degree=len(devices))
    return StagePlan(layers=layers, mesh=mesh, **{**arguments, **changes})


PREDICTED = PredictedStage(
    steady_seconds=0.3,
    boundary_seconds=0.1,
    forward_seconds=0.1,
    backward_seconds=0.2,
    peak_bytes=22 * 2**30,
)

PLAN = Plan(
    global_batch_size=32,
    num_microbatches=4,
    stages=(
        stage((0, 7), [2, 3], checkpointing=Checkpointing(layers=3)),
        stage((7, 12), [0, 1], zero_stage=ZeroStage.NONE),
    ),
    predicted=Predicted(step_seconds=1.5, stages=(PREDICTED, replace(PREDICTED, peak_bytes=2**30))),
    fingerprint=(("world_size", "4"),),
)


PREDICTIONS = ["forward", "backward", "peak memory"]


def test_table():
    lines = render(PLAN).splitlines()
    assert lines[0] == "2 stages on 4 devices, 1f1b: 32 rows in 4 microbatches"
    cells = [
        [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]
        for line in lines
        if "│" in line or "┃" in line
    ]
    assert cells == [
        ["stage", "layers", "devices", "microbatch", "data parallel", "ZeRO", "checkpointed", *PREDICTIONS],
        ["0", "0-6 (7)", "2-3", "4", "2", "1", "3", "100 ms", "200 ms", "22.0 GiB"],
        ["1", "7-11 (5)", "0-1", "4", "2", "0", "0", "100 ms", "200 ms", "1.0 GiB"],
    ]
    assert lines[-1] == "predicted step: 1.5 s"


def test_where_seconds_go_stands_below_the_table():
    spent = (("compute_seconds", 1.2), ("bubble_seconds", 0.3))
    stages = tuple(replace(found, spent=spent) for found in PLAN.predicted.stages)
    lines = render(replace(PLAN, predicted=Predicted(step_seconds=1.5, stages=stages))).splitlines()
    below = next(index for index, line in enumerate(lines) if line.startswith("where 1.5 s per step go"))
    assert below > next(index for index, line in enumerate(lines) if line.startswith("└"))
    assert lines[-1] == "predicted step: 1.5 s"


def test_columns_appear_where_they_say_something():
    plain = render(replace(PLAN, predicted=None))
    for word in ("tensor", "context", "sequence", "offload", "peak", "predicted"):
        assert word not in plain
    mesh = StageMesh(devices=(2, 3), tensor_parallel_degree=2)
    other = replace(
        PLAN.stages[0], mesh=mesh, microbatch_size=8, offload=OffloadRatios(optimizer=0.25, activations=0.5)
    )
    text = render(replace(PLAN, stages=(other, PLAN.stages[1])), width=200)
    assert "tensor parallel" in text
    assert "optimizer 0.25, activations 0.5 " in text
    own = replace(other, offload=OffloadRatios(activations=0.5, checkpoints=0.0))
    text = render(replace(PLAN, stages=(own, PLAN.stages[1])), width=200)
    assert "activations 0.5, checkpoints 0 " in text


def test_groups_that_shard_are_a_column_of_their_own():
    mesh = StageMesh(devices=tuple(range(16)), data_parallel_degree=16, shard_degree=8)
    hybrid = replace(stage((0, 7), range(16), microbatch_size=1), mesh=mesh)
    plan = Plan(global_batch_size=16, num_microbatches=1, stages=(hybrid,))
    heading, row = (render(plan, width=200).splitlines()[line].replace("┃", "│").split("│") for line in (2, 4))
    assert {name.strip(): cell.strip() for name, cell in zip(heading, row, strict=True)}["HSDP"] == "2 x 8"
    whole = replace(plan, stages=(replace(hybrid, mesh=replace(mesh, shard_degree=None)),))
    assert describe_changes(whole, plan) == "stage 0: HSDP whole -> 2 x 8"


def test_kinds_of_devices_are_shown_if_given():
    plan = Plan(global_batch_size=16, num_microbatches=2, stages=(stage((0, 1), (1,)), stage((1, 2), (0,))))
    shown = render(plan, devices=("L4", "A100-40"))
    assert [cell.strip() for cell in shown.splitlines()[4].split("│")[1:4]] == ["0", "L4", "0 (1)"]
    assert "A100-40" not in render(plan)


def test_chunks_show_their_group():
    text = render(plan_of(2, 2, *[{}] * 4, groups=2, schedule="interleaved-1f1b"))
    rows = [line.replace("│", " ").split() for line in text.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
    assert "chunk" not in render(PLAN)


def test_no_word_is_cut_off_where_there_are_many_columns():
    mesh = StageMesh(devices=(2, 3), tensor_parallel_degree=2, sequence_parallel=True)
    other = replace(PLAN.stages[0], mesh=mesh, microbatch_size=8)
    for width in (80, 100, 120):
        lines = render(replace(PLAN, stages=(other, PLAN.stages[1])), width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
    assert any("pointed" in line for line in lines)


def test_scattered_devices():
    plan = plan_of(5, 1, {"layers": 0, "devices": [0, 1, 4, 3, 2]})
    assert "0-1, 4, 3, 2" in render(plan)
    assert render(plan).startswith("1 stage on 5 devices, 1f1b: 5 rows in 1 microbatch\n")
    assert "none" in render(plan)


def test_color_is_an_option():
    assert "\x1b[" not in render(PLAN)
    assert "\x1b[" in render(PLAN, color=True)


def test_changes_between_plans():
    other = replace(
        PLAN,
        stages=(stage((0, 6), [2, 3]), stage((6, 12), [0, 1])),
        schedule="gpipe",
        predicted=Predicted(step_seconds=1.2, stages=PLAN.predicted.stages[1:] * 2),
        fingerprint=(("precision", "32-true"),),
    )
    assert describe_changes(PLAN, other).splitlines() == [
        "schedule: 1f1b -> gpipe",
        "stage 0: layers 0-6 (7) -> 0-5 (6)",
        "stage 0: checkpointed 3 -> 0",
        "stage 0: peak memory 22.0 GiB -> 1.0 GiB",
        "stage 1: layers 7-11 (5) -> 6-11 (6)",
        "stage 1: ZeRO 0 -> 1",
        "predicted step: 1.5 s -> 1.2 s (-20.0%)",
        "made for precision: not said -> 32-true",
        "made for world_size: 4 -> not said",
    ]


def test_changes_that_do_not_show():
    slower = replace(PREDICTED, steady_seconds=0.31)
    other = replace(PLAN, predicted=Predicted(step_seconds=1.5, stages=(slower, PLAN.predicted.stages[1])))
    assert describe_changes(PLAN, other) == "the plans run alike and differ in details of predictions"


def test_changes_in_the_number_of_stages():
    one = Plan(global_batch_size=8, num_microbatches=1, stages=(stage((0, 12), [0, 1]),))
    two = Plan(global_batch_size=8, num_microbatches=1, stages=(stage((0, 6), [0]), stage((6, 12), [1])))
    text = describe_changes(one, two)
    assert "num_stages: 1 -> 2" in text
    assert "stage 1: only in the other plan, layers 6-11 (6), devices 1, microbatch 8" in text
    assert "stage 1: not in the other plan, layers 6-11 (6)" in describe_changes(two, one)


@given(plans(runnable=False, predicted=True), plans(runnable=False, predicted=True))
def test_equal_plans_have_no_changes_and_others_have(plan, other):
    assert describe_changes(plan, plan) == "the plans are equal"
    assert render(plan).startswith(str(plan.num_stages))
    if (plan.bounds, plan.num_microbatches) != (other.bounds, other.num_microbatches):
        assert describe_changes(plan, other) != "the plans are equal"


def test_what_stays_whole_is_said_for_the_degrees_of_the_plan():
    shared = StageMesh(devices=(1, 2), tensor_parallel_degree=2)
    stages = (StagePlan(layers=(0, 1), mesh=shared, microbatch_size=1), stage((1, 2), [0], microbatch_size=1))
    plan = Plan(global_batch_size=3, num_microbatches=3, stages=stages)
    splits = tuple(TensorSplit(degree=degree, parameters=(), notes=(f"of {degree}",)) for degree in (2, 4))
    found = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=(), splits=splits)
    assert split_notes(plan, found) == ("tensor_parallel_degree 2: of 2",)


def test_what_zero_deals_out_whole_is_said_with_the_reason_and_what_it_costs():
    regions = {"embed.w": (0, 2), "blocks.0.w": (0,), "blocks.0.v": (0,), "blocks.1.w": (1,), "blocks.2.w": (2,)}
    uses = (
        ParameterUse(
            name=name,
            slots=((name[:-2], name[-1], regions[name]),),
            shape=(9 if name == "embed.w" else 1 + (name == "blocks.0.w"), 64),
            dtype="float32",
            requires_grad=True,
        )
        for name in regions
    )
    blocks = ("blocks.0", "blocks.1", "blocks.2")
    found = ModuleMap(step="s", blocks=blocks, cuts=(), parameters=tuple(uses), even_shards=True)
    one, descending = ({"layers": 3, "devices": devices, "zero": 2} for devices in ((0, 1), (1, 0)))
    two = plan_of(8, 2, {"layers": 2, "data": 2, "zero": 1}, {"data": 2, "zero": 0})
    said = "ZeRO deals out {} whole, not in even pieces, on stage 0: {}"
    cost = "; the fullest rank has {} times the mean"
    assert split_notes(plan_of(8, 1, one), found) == ()
    assert split_notes(plan_of(8, 1, descending), found) == (
        said.format("parameters", "the devices of a stage are not in ascending order") + cost.format(1.29),
    )
    assert split_notes(two, found) == (said.format("embed.w", "several stages hold it") + cost.format(1.69),)
    whole = replace(found, even_shards=False).excluding("Muon is", "even_shards").excluding("a loop", "even_shards")
    assert split_notes(plan_of(8, 1, one), whole) == (said.format("parameters", "Muon is; a loop") + cost.format(1.29),)
    # Without what has no equal.
    without = replace(whole, parameters=whole.parameters[2:4])
    assert split_notes(plan_of(8, 1, one), without) == (said.format("parameters", "Muon is; a loop"),)
