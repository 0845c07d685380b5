"""Tensor parallelism, alone and with everything else, gives the loss and the gradients of a single process."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.model.split.splits import derive_splits
from lightning_mist.tensors import slice_rows
from tests import zoo
from tests.integration.parity import Rank, assert_equal, map_of, precision_of, reference, run_plan
from tests.integration.test_parity import plan_for, prepared
from tests.memory_transport import InMemoryWorld
from tests.plans import plans
from tests.tiers import examples, tiered

# Torch hides this one itself when a fake meets a tensor of the stage, but cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

PLANS = {
    "two ranks": {"stages": 1, "tensor": 2},
    "two ranks, checkpointed": {"stages": 1, "tensor": 2, "checkpointed": 2, "parts": 2},
    "sequence": {"stages": 1, "tensor": 2, "sequence": True},
    "sequence, checkpointed": {"stages": 1, "tensor": 2, "sequence": True, "checkpointed": 9},
    "four ranks": {"stages": 1, "tensor": 4, "sequence": True},
    "from two to four": {"stages": 2, "tensor": [2, 4], "sequence": True, "parts": 2},
    "with data parallel": {"stages": 1, "tensor": 2, "degrees": [2], "zero": 1},
    "two stages": {"stages": 2, "tensor": 2, "parts": 2},
    "two stages, gpipe": {"stages": 2, "tensor": 2, "parts": 2, "schedule": "gpipe"},
    "two stages, sequence": {"stages": 2, "tensor": 2, "sequence": True, "checkpointed": 1},
    "two chunks each": {"stages": 4, "chunks": 2, "tensor": 2, "sequence": True, "checkpointed": 1},
    "zero bubble": {"stages": 2, "tensor": 2, "sequence": True, "checkpointed": 1, "schedule": "zb-h1"},
    "from two ranks to two slices": {"stages": 2, "degrees": [1, 2], "tensor": [2, 1], "zero": [0, 1]},
    "from two slices to two ranks": {"stages": 2, "degrees": [2, 1], "tensor": [1, 2], "zero": [1, 0]},
    "from whole to parts of sequences": {
        "stages": 2, "degrees": [2, 1], "tensor": [1, 2], "sequence": [False, True], "checkpointed": 9,
    },
    "from parts of sequences to whole": {
        "stages": 2, "degrees": [1, 2], "tensor": [2, 1], "sequence": [True, False], "checkpointed": 1,
    },
    "from parts of sequences to copies": {"stages": 2, "tensor": 2, "sequence": [True, False]},
    "gradients sharded": {"stages": 1, "degrees": [2], "tensor": 2, "zero": 2},
    "all sharded": {"stages": 1, "degrees": [2], "tensor": 2, "zero": 3, "checkpointed": 1, "sequence": True},
    "parts of sequences to sharded": {
        "stages": 2, "degrees": [1, 2], "tensor": [2, 1], "sequence": [True, False], "zero": [0, 3],
    },
    "sharded parts of sequences": {
        "stages": 2, "degrees": [1, 2], "tensor": [1, 2], "sequence": [False, True], "zero": [0, 3], "checkpointed": 1,
    },
}  # fmt: skip

CORE = ("two stages, sequence", "all sharded")
"""Plans that every model runs; one runs all."""

MODELS = ("nano", "gpt2", "llama", "lora_llama", "bert", "vit", "encoder", "t5", "demo", "phi3", "falcon")


@cache
def split(name, dtype=torch.float64):
    module, module_map, batches = prepared(name, dtype)
    return module, splits_of(module, module_map, batches[0], (2, 4)), batches


def splits_of(module, module_map, batch, degrees):
    with precision_of(module):
        return derive_splits(module, lambda value: module.training_step(value, 0), batch, module_map, degrees)


EVERY = [(name, label) for name in MODELS for label in PLANS if label in CORE or name == "nano"]


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("name", "label"), tiered(EVERY, [case for case in EVERY if case[0] in ("nano", "t5", "phi3")])
)
def test_parity(name, label):
    module, module_map, batches = split(name)
    options = PLANS[label]
    if module_map.excludes("sequence"):
        options = {**options, "sequence": False}
    plan = plan_for(len(module_map.blocks), **options)
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.sample
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_parity_in_single_precision(name):
    module, module_map, batches = split(name, torch.float32)
    sequence = [False, not module_map.excludes("sequence")]
    plan = plan_for(len(module_map.blocks), stages=2, degrees=[2, 1], tensor=[1, 2], zero=[1, 0], sequence=sequence)
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.combinations
@pytest.mark.parametrize("rows", [[5, 12, 7], [1, 2, 12]])
@pytest.mark.parametrize("label", ["from parts of sequences to whole", "from whole to parts of sequences"])
def test_batches_of_any_size(label, rows):
    module, module_map, batches = split("nano")
    plan = plan_for(4, **PLANS[label])
    batches = [slice_rows(batch, 0, count) for batch, count in zip(batches, [*rows, 4], strict=False)]
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.mark.parametrize("label", ["two stages, sequence", "from parts of sequences to whole"])
def test_sequences_of_any_length(label):
    """One that cannot be divided stays whole, on both sides of a boundary."""
    module, module_map, batches = split("nano")
    plan = plan_for(4, **PLANS[label])
    lengths = [7, 8, 5, 6][: plan.world_size]
    batches = [
        tuple(part[:, :length].contiguous() for part in batch) for batch, length in zip(batches, lengths, strict=False)
    ]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(num_layers=4, max_stages=3, max_devices=3, max_microbatches=8, tensor_degrees=(1, 2)))
def test_random_plans(plan):
    module, module_map, _ = split("nano")
    torch.manual_seed(plan.world_size)
    _, make_batch = zoo.make("nano")
    rows = plan.global_batch_size // plan.world_size
    batches = [make_batch(rows) for _ in range(plan.world_size)]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.fixture(scope="module")
def divisible():
    """A model with tied embedding and head whose vocabulary two ranks can share."""
    torch.manual_seed(3)
    module, make_batch = zoo.make("nano")
    embedding = module.transformer.wte
    module.lm_head = nn.Linear(32, zoo.VOCABULARY + 1, bias=False)
    embedding.weight = module.lm_head.weight
    module.double()
    batches = [make_batch(12) for _ in range(4)]
    module_map = splits_of(module, map_of(module, batches[0]), batches[0], (2,))
    assert any(name in item.name for item in module_map.splits[0].parameters for name in ("wte", "lm_head"))
    return module, module_map, batches


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 1, "tensor": 2},
        {"stages": 1, "tensor": 2, "sequence": True, "degrees": [2], "zero": 3},
        {"stages": 2, "tensor": 2},
        {"stages": 2, "tensor": [2, 1], "degrees": [1, 2]},
        {"stages": 2, "tensor": [1, 2], "degrees": [2, 1], "zero": [1, 0], "sequence": [False, True]},
        {"stages": 2, "tensor": [1, 2], "degrees": [1, 1], "zero": 1},
    ],
)
def test_a_tied_vocabulary_in_parts(divisible, options):
    """The copies' gradients are summed also where one stage holds parts and the other the whole."""
    module, module_map, batches = divisible
    plan = plan_for(4, **options)
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


def test_nothing_is_gathered_that_has_a_rule():
    module, module_map, batches = split("nano")
    plan = plan_for(4, stages=1, tensor=2)
    rank = Rank.make(copy.deepcopy(module), module_map, plan, 0, InMemoryWorld(2).transports[0])
    assert rank.parts.keys() == {item.name for item in module_map.splits[0].parameters}
    counted = []
    outcome = run_plan(
        module, module_map, plan, batches[:2], seen=lambda ranks: counted.extend(r.gathered() for r in ranks)
    )
    assert counted == [{}, {}]
    assert_equal(outcome, reference(module, batches[:2]))


def wholes(outcome):
    """An outcome as a reference: every gradient put together from the parts of two ranks."""
    merged = {}
    for gradients in outcome.gradients[1::-1]:
        merged.update({name: [gradient, *merged.get(name, [])] for name, gradient in gradients.items()})
    parts = outcome.parts[0]
    whole = {name: parts[name].join(found) if name in parts else found[0] for name, found in merged.items()}
    return type(outcome)(outcome.losses, [whole])


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_the_same_in_recomputation_and_in_any_number_of_stages(sequence):
    """Random states of whole batches travel to all tensor-parallel ranks of the next stage, and end equal."""
    module, module_map, batches = split("nano_dropout")
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(4)]
    plans = [
        plan_for(4, stages=stages, degrees=[4 // (2 * stages)] * stages, tensor=2, sequence=sequence, checkpointed=kept)
        for stages, kept in ((1, 0), (1, 9), (2, 1))
    ]
    outcomes = [run_plan(module, module_map, plan, batches[:4], states=states) for plan in plans]
    wanted = wholes(outcomes[0])
    for outcome in outcomes[1:]:
        assert_equal(outcome, wanted)
        assert all(torch.equal(outcome.states[rank], state) for rank, state in outcomes[0].states.items())
    assert outcomes[0].losses != reference(module, batches[:4]).losses


def test_what_was_not_checked_is_refused():
    module, module_map, batches = split("nano")
    with pytest.raises(PlanError, match=r"tensor_parallel_degree = 3: .*use tensor_parallel_degree = 1 or 2 or 4"):
        run_plan(module, module_map, plan_for(4, stages=1, tensor=3), batches[:3])
    whole = replace(module_map, splits=(replace(module_map.splits[0], sequence=()),))
    with pytest.raises(PlanError, match=r"stages\[0\]\.sequence_parallel = True: .*use sequence_parallel=False"):
        run_plan(module, whole, plan_for(4, stages=1, tensor=2, sequence=True), batches[:2])


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2, "degrees": [2, 1], "tensor": [1, 2], "sequence": [False, True], "zero": [3, 0]},
        {"stages": 2, "tensor": 2, "sequence": True, "checkpointed": [2, 0], "schedule": "zb-h1"},
    ],
)
def test_autocast(monkeypatch, options):
    """Parameters are cast part by part; gradients differ by the roundings of 16-bit numbers."""
    module, module_map, batches = split("nano", torch.float32)
    step = type(module).training_step

    def in_autocast(self, batch, batch_idx):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(self, batch, batch_idx)

    monkeypatch.setattr(type(module), "training_step", in_autocast)
    plan = plan_for(4, **options)
    batches = batches[: plan.world_size]
    # bfloat16 has 8 bits: some roundings of 2^-8, of the largest gradient.
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches), tolerance=2e-2)
