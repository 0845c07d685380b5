"""Every plan that runs gives the loss and the gradients of a single process, whatever the model."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mist.plan import Plan
from lightning_mist.schedule.stage_units import shard_units
from lightning_mist.tensors import slice_rows
from tests import zoo
from tests.integration.parity import (
    assert_equal,
    assert_trained_equal,
    cast,
    make_plan,
    map_of,
    precision_of,
    reference,
    run_plan,
    train,
    train_reference,
)
from tests.memory_transport import InMemoryWorld, drive
from tests.plans import plans
from tests.tiers import examples, tiered

# Torch hides this one itself when a fake meets a tensor of the stage, but cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

ROWS = 12

MODELS = ("gpt2", "llama", "lora_llama", "bert", "vit", "nano", "encoder", "t5", "demo")


PLANS = {
    "one stage": {"stages": 1},
    "one stage, data parallel": {"stages": 1, "degrees": [3]},
    "two stages": {"stages": 2, "checkpointed": 1},
    "uneven layers": {"stages": 2, "uneven": True, "parts": 3, "checkpointed": [1, 0]},
    "three stages, all checkpointed": {"stages": 3, "parts": 2, "checkpointed": 99},
    "four stages": {"stages": 4, "parts": 2},
    "four stages, gpipe": {"stages": 4, "schedule": "gpipe"},
    "two by two": {"stages": 2, "degrees": [2, 2], "checkpointed": [0, 9]},
    "two by two, sharded": {"stages": 2, "degrees": [2, 2], "zero": 1},
    "fan out": {"stages": 2, "degrees": [1, 2], "zero": [0, 1]},
    "fan in, checkpointed": {"stages": 2, "degrees": [2, 1], "zero": [1, 0], "checkpointed": 1},
    "fan in of three stages": {"stages": 3, "degrees": [2, 1, 1], "parts": 2},
    "three to two": {"stages": 3, "degrees": [1, 3, 2], "zero": 1},
    "replicas of different degrees": {"stages": 2, "degrees": [4, 2]},
    "gradients sharded": {"stages": 1, "degrees": [2], "zero": 2, "parts": 2},
    "all sharded": {"stages": 1, "degrees": [3], "zero": 3, "checkpointed": 2},
    "two by two, all sharded": {"stages": 2, "degrees": [2, 2], "zero": 3, "parts": 2, "checkpointed": 1},
    "two by two, all sharded, gpipe": {"stages": 2, "degrees": [2, 2], "zero": [3, 2], "schedule": "gpipe"},
    "from one to three, sharded differently": {"stages": 3, "degrees": [1, 3, 2], "zero": [3, 2, 3], "checkpointed": 9},
    "sharded in groups": {"stages": 1, "degrees": [4], "zero": 1, "shard": 2},
    "from two to four, sharded in groups": {
        "stages": 2,
        "degrees": [2, 4],
        "zero": [2, 3],
        "shard": [None, 2],
        "parts": 2,
        "checkpointed": 1,
    },
    "zero bubble of two stages": {"stages": 2, "schedule": "zb-h1", "parts": 2, "checkpointed": [1, 0]},
    "zero bubble of three stages": {"stages": 3, "schedule": "zb-h1", "parts": 2, "checkpointed": [0, 1, 0]},
    "zero bubble of four stages": {"stages": 4, "schedule": "zb-h1"},
    "zero bubble, two by two": {"stages": 2, "degrees": [2, 2], "zero": 1, "schedule": "zb-h1", "parts": 2},
    "zero bubble, all sharded": {
        "stages": 2,
        "degrees": [2, 2],
        "zero": [3, 2],
        "schedule": "zb-h1",
        "checkpointed": 1,
    },
    "zero bubble of one stage": {"stages": 1, "degrees": [2], "schedule": "zb-h1"},
    "two groups of two chunks": {"stages": 4, "chunks": 2, "checkpointed": [0, 1, 1, 0]},
    "two groups of two chunks, sharded": {"stages": 4, "chunks": 2, "degrees": [2, 2], "zero": 1, "parts": 2},
    "two groups of two chunks, all sharded": {
        "stages": 4,
        "chunks": 2,
        "degrees": [2, 2],
        "zero": [3, 2, 3, 2],
        "parts": 2,
        "checkpointed": 1,
    },
    "chunks behind the last layer": {"stages": 1, "degrees": [3], "tail": 3},
    "chunks behind the last layer of two stages": {"stages": 2, "parts": 2, "tail": 2, "checkpointed": 1},
    "chunks behind the last layer, all sharded": {"stages": 2, "degrees": [2, 2], "zero": 3, "tail": 4},
    "chunks behind the last layer, zero bubble": {"stages": 2, "schedule": "zb-h1", "parts": 2, "tail": 3},
    "chunks behind the last layer of chunks": {"stages": 4, "chunks": 2, "zero": 0, "parts": 2, "tail": 2},
    "chunks of different degrees": {"stages": 4, "chunks": 2, "degrees": [1, 2], "zero": [0, 1, 0, 1], "parts": 2},
}


@cache
def prepared(name: str, dtype: torch.dtype):
    """A model of the zoo, where it can be cut, and six batches."""
    torch.manual_seed(7)
    module, make_batch = zoo.make(name)
    module.to(dtype)
    batches = [cast(make_batch(ROWS), dtype) for _ in range(6)]
    return module, map_of(module, batches[0]), batches


def layers_of(count: int, stages: int, *, uneven: bool = False) -> list[int]:
    """``count`` layers over ``stages`` stages: as even as can be, or with as many as possible in the first."""
    if uneven:
        return [count - stages + 1] + [1] * (stages - 1)
    return [count * (index + 1) // stages - count * index // stages for index in range(stages)]


def plan_for(count: int, *, stages: int, uneven: bool = False, chunks: int = 1, **options) -> Plan:
    if chunks > 1:
        options.setdefault("schedule", "interleaved-1f1b")
    return make_plan(layers_of(count, stages, uneven=uneven), rows=ROWS, chunks=chunks, **options)


CORE = (
    "two stages",
    "three stages, all checkpointed",
    "two by two, sharded",
    "fan out",
    "three to two",
    "all sharded",
    "two by two, all sharded",
    "from one to three, sharded differently",
    "two groups of two chunks",
    "zero bubble of three stages",
)
"""Plans that every model runs; two decoders with tied weights run all."""


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("name", "label"),
    [(name, label) for name in MODELS for label in PLANS if label in CORE or name in ("gpt2", "nano")],
)
def test_parity(name, label):
    module, module_map, batches = prepared(name, torch.float64)
    assert module_map.excludes("pipeline") == ()
    plan = plan_for(len(module_map.blocks), **PLANS[label])
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


def test_three_groups_of_chunks():
    module, module_map, batches = prepared("t5", torch.float64)
    plan = plan_for(len(module_map.blocks), stages=6, chunks=2, checkpointed=[0, 1, 0, 0, 1, 1], parts=2)
    assert_equal(run_plan(module, module_map, plan, batches[:3]), reference(module, batches[:3]))


def test_the_gradient_of_what_has_no_rows_comes_to_one_rank_alone():
    module, module_map, batches = prepared("t5", torch.float64)
    plan = plan_for(len(module_map.blocks), stages=2, degrees=[2, 1], zero=1, uneven=True)
    assert_equal(run_plan(module, module_map, plan, batches[:3]), reference(module, batches[:3]))


@pytest.mark.sample
@pytest.mark.parametrize("name", MODELS)
def test_parity_in_single_precision(name):
    module, module_map, batches = prepared(name, torch.float32)
    plan = plan_for(len(module_map.blocks), stages=3, degrees=[2, 1, 2], zero=1, checkpointed=[0, 1, 9])
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.combinations
@pytest.mark.parametrize("rows", [[5, 12, 7], [1, 2, 12]])
@pytest.mark.parametrize("label", ["fan out", "fan in, checkpointed", "all sharded", "chunks behind the last layer"])
@pytest.mark.parametrize("name", ["nano", "vit", "t5"])
def test_batches_of_any_size(name, label, rows):
    """The last batch of an epoch: fewer rows, not divisible, or fewer than the parts it is cut into."""
    module, module_map, batches = prepared(name, torch.float64)
    plan = plan_for(len(module_map.blocks), parts=2, **PLANS[label])
    batches = [slice_rows(batch, 0, count) for batch, count in zip(batches, rows, strict=False)]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


def test_random_numbers_of_layers_are_those_of_whole_batches_beside_chunks_behind_them():
    module, module_map, batches = prepared("gpt2_dropout", torch.float64)
    plan = plan_for(len(module_map.blocks), stages=2, tail=3)
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(2)]
    outcome = run_plan(module, module_map, plan, batches[:2], states=states)
    expected = reference(module, batches[:2], states=states)
    assert_equal(outcome, expected)
    assert all(torch.equal(outcome.states[rank], state) for rank, state in expected.states.items())


@pytest.mark.parametrize(("name", "lap"), [("gpt2", 1), ("nano", 0)])
@pytest.mark.parametrize(
    "options", [{"stages": 1, "tail": 20}, {"stages": 2, "degrees": [2, 2], "zero": 3, "parts": 2, "tail": 5}]
)
def test_tokens_behind_the_last_layer_come_in_any_number_of_chunks(name, lap, options):
    module, module_map, batches = prepared(name, torch.float64)
    plan = plan_for(len(module_map.blocks), **options)
    outcome = run_plan(module, replace(module_map, lap=lap), plan, batches[: plan.world_size])
    assert_equal(outcome, reference(module, batches[: plan.world_size]))


class Aside(zoo.Plain):
    """Looks behind its layers at what was computed in front of them; only some batches train it."""

    def __init__(self):
        super().__init__()
        self.side = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        side, h = self.side(batch["x"]).exp(), self.first(batch["x"])
        for block in self.blocks:
            h = block(h)
        mean = side.mean()  # as if to log it
        return self.loss(h, batch) + (mean if batch["extra"][0] else 0.0)


UNUSED = {
    "chunks behind the last layer": {"stages": 1, "tail": 3},
    **{label: PLANS[label] for label in ("fan out", "fan in of three stages", "zero bubble, all sharded")},
    "two groups of two chunks": PLANS["two groups of two chunks, all sharded"],
}


@pytest.mark.parametrize("used", [(False, False), (True, False)])
@pytest.mark.parametrize("label", UNUSED)
def test_what_the_loss_does_not_use_has_no_gradient(label, used):
    torch.manual_seed(0)
    module, plan = Aside().double(), plan_for(4, **UNUSED[label])
    batches = [{**cast(zoo.xy_batch(12), torch.float64), "extra": torch.full((12,), flag)} for flag in used * 2]
    outcome = run_plan(module, map_of(module, batches[0]), plan, batches[: plan.world_size])
    assert_equal(outcome, reference(module, batches[: plan.world_size]))
    given = [gradients["side.weight"] for gradients in outcome.gradients if "side.weight" in gradients]
    assert all((gradient is not None) == any(used) for gradient in given)


@pytest.mark.combinations
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1},
        {"stages": 3, "checkpointed": 9},
        {"stages": 4},
        {"stages": 2, "degrees": [2, 2], "zero": 1, "checkpointed": 1},
        {"stages": 4, "chunks": 2},
    ],
)
@pytest.mark.parametrize("name", ["gpt2_dropout", "nano_dropout", "noise"])
def test_random_state_travels_with_whole_batches(name, options):
    """Dropout is that of a process which runs each batch alone, and so is the state that is left."""
    module, module_map, batches = prepared(name, torch.float64)
    plan = plan_for(len(module_map.blocks), **options)
    batches = batches[: plan.world_size]
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(plan.world_size)]
    expected = reference(module, batches, states=states)
    outcome = run_plan(module, module_map, plan, batches, states=states)
    assert_equal(outcome, expected)
    for rank, state in expected.states.items():
        assert torch.equal(outcome.states[rank], state)
    other = reference(module, batches, states=[torch.Generator().manual_seed(99).get_state()] * len(batches))
    assert other.losses != expected.losses


def test_seeded_parts_draw_the_same_numbers_in_recomputation():
    """Cut batches are seeded per stage and microbatch; checkpointing and the order of a schedule change nothing."""
    module, module_map, batches = prepared("nano_dropout", torch.float64)
    outcomes = [
        run_plan(module, module_map, plan_for(4, stages=2, parts=3, **options), batches[:2], seed=5)
        for options in ({}, {"checkpointed": 9}, {"schedule": "gpipe"})
    ]
    for outcome in outcomes[1:]:
        assert_equal(outcome, _as_reference(outcomes[0]))
    different = run_plan(module, module_map, plan_for(4, stages=2, parts=3), batches[:2], seed=6)
    assert different.losses != outcomes[0].losses


def _as_reference(outcome):
    merged = {name: gradient for gradients in outcome.gradients for name, gradient in gradients.items()}
    return type(outcome)(outcome.losses, [merged])


def test_a_loss_scale_scales_every_gradient_and_no_loss():
    module, module_map, batches = prepared("nano", torch.float64)
    plan = plan_for(4, stages=2, degrees=[1, 2])
    outcome = run_plan(module, module_map, plan, batches[:3], loss_scale=1024.0)
    assert_equal(outcome, reference(module, batches[:3]), scale=1024.0)


@pytest.mark.sample
@pytest.mark.parametrize("name", [name for name in zoo.PARITY if name not in MODELS and "dropout" not in name])
def test_the_rest_of_the_zoo(name):
    """Whatever may be pipelined, with whole batches."""
    module, module_map, batches = prepared(name, torch.float64)
    assert module_map.excludes("pipeline") == ()
    checkpointed = 0 if module_map.excludes("checkpointing") else 1
    whole = plan_for(len(module_map.blocks), stages=2, degrees=[2, 2], checkpointed=checkpointed)
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(4)]
    outcome = run_plan(module, module_map, whole, batches[:4], states=states)
    assert_equal(outcome, reference(module, batches[:4], states=states))


@pytest.mark.combinations
@pytest.mark.parametrize("traced_with_extra", [True, False])
@pytest.mark.parametrize("label", [*CORE, "fan in, checkpointed"])
def test_parameters_without_gradient_in_some_batches(label, traced_with_extra):
    """Adapters inside blocks and a second head that some batches use and others do not, the traced one or not."""
    module, _, batches = prepared("sometimes", torch.float64)
    extra = [bool(batch["extra"][0]) for batch in batches]
    assert {True, False} == set(extra[:2]) == set(extra[-2:])
    module_map = map_of(module, batches[extra.index(traced_with_extra)])
    plan = plan_for(len(module_map.blocks), **PLANS[label])
    none = [batch for batch, has_extra in zip(batches, extra, strict=True) if not has_extra] * 2
    for chosen in (batches[::-1][: plan.world_size], none[: plan.world_size]):
        assert_equal(run_plan(module, module_map, plan, chosen), reference(module, chosen))


@pytest.mark.combinations
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", ["batch_norm", "self_loss", "peeking", "shared_block", "no_blocks", "stray"])
def test_modules_that_cannot_be_cut_are_sharded(name, zero):
    """Layer by layer where there are layers whose parameters only they use, else as one unit."""
    module, module_map, batches = prepared(name, torch.float64)
    assert module_map.excludes("pipeline")
    units = shard_units(module_map, ((0, len(module_map.blocks)),), 0)
    assert (len(units) == 1) is (name in ("shared_block", "no_blocks", "stray"))
    plan = plan_for(len(module_map.blocks), stages=1, degrees=[2], zero=zero)
    assert_equal(run_plan(module, module_map, plan, batches[:2]), reference(module, batches[:2]))


class Apart(zoo.Plain):
    """Layers take scales that lie beside them: each its own, or all the same; or the last one's bias serves as one."""

    def __init__(self, way):
        super().__init__()
        self.way, self.scales = way, torch.nn.ParameterList([torch.nn.Parameter(torch.ones(zoo.WIDTH))] * 4)
        if way == "each":
            self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(zoo.WIDTH)) for _ in range(4)])

    def block(self):
        return Scaled()

    def training_step(self, batch, batch_idx):
        h = self.first(batch["x"])
        for block, scale in zip(self.blocks, self.scales, strict=True):
            h = block(h, None if self.way == "behind" else scale)
        return self.loss(h * self.blocks[-1].inner.bias if self.way == "behind" else h, batch)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, h, scale):
        return h + torch.tanh(self.inner(h)) * (1.0 if scale is None else scale)


@pytest.mark.parametrize(
    ("way", "zero", "name"),
    [("each", 2, "scales.3 lies out"), ("one", 3, "scales.3 lies out"), ("behind", 3, "bias lies in")],
)
def test_what_lies_elsewhere_than_it_is_used_is_sharded_with_the_whole_module(way, zero, name):
    torch.manual_seed(0)
    module, batches = Apart(way).double(), [cast(zoo.xy_batch(12), torch.float64) for _ in range(2)]
    module_map = map_of(module, batches[0])
    assert name in " ".join(module_map.excludes("shards"))
    plan = make_plan([4], degrees=[2], rows=ROWS, zero=zero)
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.parametrize(
    ("layers", "degrees", "zero"),
    tiered(
        [
            ([2, 2], [1, 2], [0, 3]),
            ([2, 2], [2, 1], [3, 0]),
            ([1, 3], [1, 2], [0, 3]),
            ([1, 1, 2], [1, 1, 2], [0, 0, 3]),
            ([1, 1, 2], [1, 2, 1], [0, 3, 0]),
        ],
        [([1, 1, 2], [1, 1, 2], [0, 0, 3])],
    ),
)
def test_what_stages_before_do_with_a_sharded_parameter_is_done_for_its_form(layers, degrees, zero):
    """A weight of the head in a penalty of the tail, and one that is used between layers of several stages."""
    module, module_map, batches = prepared("skips", torch.float64)
    plan = make_plan(layers, degrees=degrees, zero=zero, rows=ROWS, parts=2)
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(num_layers=4, max_microbatches=12), name=st.sampled_from(["nano", "plain", "skips"]))
def test_random_plans(plan, name):
    module, module_map, _ = prepared(name, torch.float64)
    torch.manual_seed(plan.world_size)
    _, make_batch = zoo.make(name)
    rows = plan.global_batch_size // plan.world_size
    batches = [cast(make_batch(rows), torch.float64) for _ in range(plan.world_size)]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.combinations
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "degrees": [3], "zero": 1},
        {"stages": 2, "degrees": [2, 2], "zero": 1, "checkpointed": 1},
        {"stages": 1, "degrees": [3], "zero": 2, "parts": 2},
        {"stages": 2, "degrees": [2, 2], "zero": 3, "parts": 2, "checkpointed": 1},
        {"stages": 3, "degrees": [1, 2, 1], "zero": [0, 1, 0], "parts": 2},
        {"stages": 4},
        {"stages": 4, "chunks": 2, "degrees": [2, 2], "zero": 1, "parts": 2},
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_training_with_clipping_and_optimizer_state(name, options):
    """Three clipped AdamW steps: parameters on every rank and the optimizer's state are a single process's."""
    module, module_map, batches = prepared(name, torch.float64)
    plan = plan_for(len(module_map.blocks), **options)
    steps = [[batches[(rank + step) % 6] for rank in range(plan.world_size)] for step in range(3)]
    world = InMemoryWorld(plan.world_size)
    with precision_of(module):
        ranks = drive([train(copy.deepcopy(module), module_map, plan, steps, t) for t in world.transports])
    assert_trained_equal(ranks, train_reference(module, steps))
    assert world.pending == ()


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "degrees": [4], "zero": 1, "shard": 2},
        {"stages": 2, "degrees": [2, 2], "zero": [2, 3], "parts": 2, "checkpointed": 1},
    ],
)
def test_training_by_owners_of_whole_parameters(options):
    """As optimizers need that look at more than one entry."""
    module, module_map, batches = prepared("nano", torch.float64)
    plan, dealt = plan_for(len(module_map.blocks), **options), replace(module_map, even_shards=False)
    steps = [[batches[(rank + step) % 6] for rank in range(plan.world_size)] for step in range(3)]
    with precision_of(module):
        transports = InMemoryWorld(plan.world_size).transports
        ranks = drive([train(copy.deepcopy(module), dealt, plan, steps, transport) for transport in transports])
    assert_trained_equal(ranks, train_reference(module, steps))
