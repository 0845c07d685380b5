import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts.mapping import (
    compiled_exclusions,
    container_of,
    find_blocks,
    find_exclusions,
    map_module,
    structure_problems,
)
from lightning_mist.model.cuts.recorder import Record, run_twice
from lightning_mist.tensors import slice_rows
from tests import zoo


def mapped(name, rows=4, **kwargs):
    module, make_batch = zoo.make(name)
    batch = make_batch(rows)
    return module, map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, rows - 1), **kwargs)


@pytest.mark.sample
@pytest.mark.parametrize("name", zoo.PARITY)
def test_models_that_can_be_cut(name):
    module, found = mapped(name)
    assert len(found.blocks) >= 2
    assert found.excludes("pipeline") == ()
    assert found.excludes("microbatches") == ()
    assert len(found.cuts) == len(found.blocks) - 1
    assert all(cut for cut in found.cuts)
    assert [use.name for use in found.parameters] == [name for name, _ in module.named_parameters()]
    assert found.batch_rows == 4


@pytest.mark.parametrize(("name", "reason"), zoo.HAZARDS.items())
def test_hazards_are_refused_by_name(name, reason):
    _, found = mapped(name)
    reasons = "\n".join(found.excludes("pipeline"))
    assert re.search(reason, reasons), reasons


def test_tensors_that_cross_the_cuts():
    _, found = mapped("t5")
    encoder, middle, decoder = found.cuts[0], found.cuts[2], found.cuts[4]
    assert [(live.shape, live.batch_dim) for live in encoder] == [((4, 12, 32), 0), ((1, 4, 12, 12), None)]
    assert [(live.shape, live.batch_dim) for live in middle] == [((4, 12, 32), 0), ((4, 12, 32), 0)]
    assert [live.shape for live in decoder] == [(4, 12, 32), (1, 4, 12, 12), (4, 12, 32)]
    assert all(live.requires_grad and live.dtype == "float32" for cut in found.cuts for live in cut)
    _, found = mapped("sequence_first")
    assert {(live.shape, live.batch_dim) for live in found.cuts[0]} == {((16,), None), ((5, 4, 16), 1)}


def test_what_runs_behind_the_last_layer_is_given_what_layers_hand_it():
    for name, last in {"nano": 3, "t5": 5, "bert": 3}.items():
        _, found = mapped(name)
        assert [(live.key, live.batch_dim) for live in found.tail] == [(("block", last, 0), 0)]
        assert found.whole_tail == ()
    apart = found.with_tail_apart()
    assert apart.cuts == (*found.cuts, found.tail)
    behind = {use.name for use in apart.parameters if 4 in use.regions}
    assert "model.cls.predictions.bias" in behind
    assert not any(".layer." in name for name in behind)


def test_what_is_of_all_rows_may_not_be_taken_in_chunks_behind_the_last_layer():
    _, found = mapped("sequence_first")
    assert found.excludes("pipeline") == ()
    (reason,) = found.whole_tail
    assert "before layer 0) is of all rows and is used behind the last layer" in reason


def test_random_numbers_that_are_used_later_cross_the_cuts():
    _, found = mapped("noise")
    assert [(live.shape, live.requires_grad) for live in found.cuts[1]] == [((4, 8), False), ((4, 16), True)]


def test_uses_of_tied_and_borrowed_parameters():
    _, found = mapped("gpt2")
    tied = found.parameters[0]
    assert tied.slots == (("model.transformer.wte", "weight", (-1,)), ("model.lm_head", "weight", (3,)))
    assert found.owners(((0, 2), (2, 4)))[tied.name] == (0, 1)
    _, found = mapped("borrowed")
    assert {use.name: use.regions for use in found.parameters}["blocks.2.1.weight"] == (2, 3)


def test_unused_parameters_have_no_region():
    _, found = mapped("contrastive")
    assert [use.name for use in found.parameters if not use.regions] == ["head.weight", "head.bias"]


def test_frozen_parts_send_nothing_back():
    module, make_batch = zoo.make("plain")
    module.first.requires_grad_(False)
    module.blocks[0].requires_grad_(False)
    found = map_module(module, zoo.step(module), make_batch(3))
    assert [[live.requires_grad for live in cut] for cut in found.cuts] == [[False], [True], [True]]


def test_batch_statistics_rule_out_microbatches_and_checkpointing():
    _, found = mapped("batch_norm")
    for feature in ("pipeline", "microbatches", "checkpointing"):
        assert "BatchNorm2d, and buffers of 3 other modules" in found.excludes(feature)[0]
    assert len(found.blocks) == 4


def test_attributes_changed_by_the_step_rule_out_microbatches():
    assert "attribute seen" in mapped("counter")[1].excludes("microbatches")[0]


def test_blocks_that_read_more_than_their_arguments_are_not_recomputed():
    _, found = mapped("closure")
    assert "block blocks.0 reads a tensor that is not one of its arguments" in found.excludes("checkpointing")[0]
    assert all(not mapped(name)[1].excludes("checkpointing") for name in ("gpt2", "t5", "mixtral", "masked"))


def test_objects_of_the_user_that_keep_count_are_noticed():
    class Meter:
        def __init__(self):
            self.values = []

    class Metered(zoo.Plain):
        def __init__(self):
            super().__init__()
            self.meter = Meter()

        def training_step(self, batch, batch_idx):
            self.meter.values.append(1)
            return super().training_step(batch, batch_idx)

    module = Metered()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert "changes the attribute meter of the module" in found.excludes("pipeline")[0]
    assert module.meter.values == []


def test_a_step_that_reads_its_own_loss_may_be_cut():
    class Asserting(zoo.Plain):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not torch.isfinite(loss):
                raise ValueError("not finite")
            assert loss.item() > 0
            return loss

    module = Asserting()
    assert map_module(module, zoo.step(module), zoo.xy_batch(3)).exclusions == ()


def test_random_numbers_read_inside_a_block_are_its_own_business():
    class Depth(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(zoo.WIDTH, zoo.WIDTH)

        def forward(self, h):
            return h if torch.rand(()) < 0.3 else h + self.linear(h)

    class Stochastic(zoo.Plain):
        def block(self):
            return Depth()

    torch.manual_seed(1)
    module = Stochastic()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert not any("random number" in item.reason for item in found.exclusions)


def test_a_second_visit_of_another_container_is_named():
    class Twice(zoo.Plain):
        def training_step(self, batch, batch_idx):
            return sum(super(Twice, self).training_step(batch, batch_idx) for _ in range(2))

    module = Twice()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert found.blocks == ()
    for feature in ("pipeline", "checkpointing"):
        assert "block blocks.0 is called more than once in one step" in found.excludes(feature)[0]
    whole = map_module(module, zoo.step(module), zoo.xy_batch(3), may_repeat=True)
    assert whole.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert not whole.excludes("checkpointing")


def test_a_container_that_never_runs_is_left_out():
    class Spare(zoo.Plain):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.ModuleList([zoo.small_block() for _ in range(2)])

    module = Spare()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert found.blocks == tuple(f"blocks.{i}" for i in range(4))
    assert found.exclusions == ()


def test_blocks_in_another_order_than_they_are_held():
    class Reversed(zoo.Plain):
        def training_step(self, batch, batch_idx):
            h = self.first(batch["x"])
            for block in reversed(self.blocks):
                h = block(h)
            return self.loss(h, batch)

    module = Reversed()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert found.blocks == tuple(f"blocks.{i}" for i in (3, 2, 1, 0))


def test_collectives_are_seen_in_a_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        _, found = mapped("collective")
    finally:
        torch.distributed.destroy_process_group()
    assert "the step talks to other processes itself (c10d::allreduce_" in found.excludes("pipeline")[0]
    assert "zoo.py" in found.excludes("pipeline")[0]


@pytest.mark.parametrize(
    "name", ["gpt2_dropout", "demo", "batch_norm", "counter", "metric", "total", "broken", "noise"]
)
def test_nothing_is_changed(name):
    module, make_batch = zoo.make(name)
    batch = make_batch(3)
    values = {key: value.clone() for key, value in module.state_dict().items()}
    parameters = list(module.parameters())
    attributes = {n: {k: (v, repr(v)) for k, v in vars(m).items()} for n, m in module.named_modules()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    map_module(module, zoo.step(module), batch)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(torch.equal(value, values[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in parameters)
    for name, child in module.named_modules():
        assert list(vars(child)) == list(attributes[name])
        for key, value in vars(child).items():
            assert value is attributes[name][key][0]
            assert repr(value) == attributes[name][key][1]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_hollow_parameters_are_traced_alike():
    module, found = mapped("gpt2")
    for parameter in module.parameters():
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    torch.manual_seed(0)
    _, make_batch = zoo.make("gpt2")
    batch = make_batch(4)
    again = map_module(module, zoo.step(module), batch, second_batch=slice_rows(batch, 0, 3))
    assert again.cuts == found.cuts
    assert again.parameters == found.parameters


def test_a_step_may_empty_its_batch():
    module, make_batch = zoo.make("plain")
    batch = make_batch(3)

    def step(batch):
        return module.training_step({"x": batch.pop("x"), "y": batch.pop("y")}, 0)

    assert map_module(module, step, batch).exclusions == ()
    assert set(batch) == {"x", "y"}


def test_without_a_second_batch_no_dimension_is_known():
    module, make_batch = zoo.make("plain")
    found = map_module(module, zoo.step(module), make_batch(3))
    assert {live.batch_dim for cut in found.cuts for live in cut} == {None}
    assert found.exclusions == ()


def test_shared_memory_written_to_after_a_cut_is_refused():
    class Aliased(zoo.Plain):
        def training_step(self, batch, batch_idx):
            h = self.first(batch["x"])
            half = h[:, :2]
            for block in self.blocks:
                g = block(h)
                half.add_(g[:, :2])
            return self.loss(h, batch)

    module = Aliased()
    found = map_module(module, zoo.step(module), zoo.xy_batch(3))
    assert "two tensors that share memory are used before and after layer 1" in found.excludes("pipeline")[0]


class Writes(nn.Module):
    """Writes into a weight in one of many ways, and uses one of two parts by how many rows there are."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        self.way(self.first.weight, x)
        return (self.second(hidden) if len(x) > 3 else hidden + self.second.bias).sum()


def replaced(weight, x):
    weight.data = weight.data * 2


def through_a_view(weight, x):
    with torch.no_grad():
        weight.view(-1)[:4].mul_(2)


@pytest.mark.parametrize(
    ("way", "writes"),
    [
        (lambda weight, x: None, ""),
        (lambda weight, x: weight.data.sum(), ""),
        (lambda weight, x: weight.data.clone().mul_(2), ""),
        (lambda weight, x: weight.data.mul_(2), "seen"),
        (lambda weight, x: weight.detach()[0].copy_(x[0]), "seen"),
        (replaced, "seen"),
        (through_a_view, "seen"),
    ],
)
def test_what_is_written_into_weights_and_what_one_run_leaves_out(way, writes):
    module, x = Writes(way), torch.ones(4, 4)
    found = map_module(module, module, x, second_batch=x[:3])
    assert found.writes == writes
    assert bool(found.excludes("sharded_parameters")) == bool(writes)
    assert found.leaves_out  # the second run has three rows
    assert not map_module(module, module, x).leaves_out


def test_of_a_step_that_cannot_be_traced_nobody_knows_what_it_writes():
    assert mapped("broken")[1].writes == "maybe"


@pytest.mark.parametrize(
    ("name", "container", "count"),
    [
        ("gpt2", "model.transformer.h", 4),
        ("llama", "model.model.layers", 4),
        ("bert", "model.bert.encoder.layer", 4),
        ("mixtral", "model.model.layers", 4),
        ("nano", "transformer.h", 4),
        ("encoder", "encoder.layers", 4),
        ("uneven", "blocks", 4),
        ("batch_norm", "net", 4),
    ],
)
def test_one_container(name, container, count):
    module, _ = zoo.make(name)
    blocks = find_blocks(module)
    assert len(blocks) == count
    assert {container_of(block) for block in blocks} == {container}


def test_encoder_and_decoder():
    containers = {container_of(block) for block in find_blocks(zoo.make("t5")[0])}
    assert containers == {"model.encoder.block", "model.decoder.block"}


def test_stages_of_different_width_hold_the_blocks():
    blocks = find_blocks(zoo.make("swin")[0])
    assert len(blocks) == 4
    assert len({container_of(block) for block in blocks}) == 2


def test_a_shared_block_is_named_once():
    block = zoo.small_block()
    assert find_blocks(nn.ModuleList([block, zoo.small_block(), block])) == ("0", "1")


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        nn.ModuleList([zoo.small_block()]),
        nn.ModuleList([nn.ReLU(), nn.ReLU()]),
    ],
    ids=["layer", "perceptron", "one child", "no parameters"],
)
def test_no_blocks(module):
    assert find_blocks(module) == ()


def test_blocks_by_name():
    module, _ = zoo.make("t5")
    decoder = tuple(f"model.decoder.block.{i}" for i in range(3))
    assert find_blocks(module, "model.decoder.block") == decoder
    assert find_blocks(module, "model.decoder.block.*") == decoder
    assert len(find_blocks(module, "T5Block")) == 6
    assert find_blocks(module, "model.decoder.block.0, model.decoder.block.2") == decoder[::2]


def test_names_that_lead_nowhere():
    module, _ = zoo.make("nano")
    with pytest.raises(TraceError, match=r"blocks='transformer\.layers': 'transformer\.layers' names no module"):
        find_blocks(module, "transformer.layers")
    with pytest.raises(TraceError, match=r"transformer\.h\.0\.attn lies inside transformer\.h\.0"):
        find_blocks(module, "transformer.h, Attention")


A, B, C = "blocks.0", "blocks.1", "blocks.2"


def problems(*records, candidates=(A, B, C)):
    return structure_problems(records, candidates)


def test_blocks_that_run_once_each_in_one_order_are_no_problem():
    assert problems(Record(order=[A, B, C]), Record(order=[A, B, C])) == ()
    assert problems(Record(order=[C, A, B]), Record(order=[C, A, B])) == ()


def test_a_container_that_does_not_run_is_no_problem():
    assert problems(Record(order=[A, B]), Record(order=[A, B]), candidates=(A, B, "spare.0", "spare.1")) == ()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"repeated": {B: "net.py:3"}}, {}, r"block blocks\.1 is called more than once .* \(again from net\.py:3\)"),
        ({}, {"order": [A, B], "nested": {C: A}}, r"block blocks\.2 runs inside block blocks\.0"),
        ({}, {"order": [A, B]}, r"block blocks\.2 is not called in every run"),
        ({}, {"order": [A]}, r"block blocks\.1 and 1 other are not called in every run"),
        ({"order": []}, {}, r"block blocks\.0 and 2 others are not called in every run"),
        ({}, {"order": [A, C, B]}, "the blocks run in another order from step to step"),
    ],
)
def test_what_stands_against_stages(first, second, reason):
    (found,) = problems(*(Record(**{"order": [A, B, C], **record}) for record in (first, second)))
    assert re.match(reason, found)


def test_one_problem_in_both_runs_is_said_once():
    record = Record(order=[A, B, C], repeated={A: "net.py:3"})
    assert len(problems(record, record)) == 1


def exclusions(name):
    module, make_batch = zoo.make(name)
    batch = make_batch(4)
    blocks = find_blocks(module, None)
    runs = run_twice(module, zoo.step(module), (batch, slice_rows(batch, 0, 3)), blocks)
    return find_exclusions(module, runs, frozenset(runs.records[0].order))


def test_a_plain_module_excludes_nothing():
    assert exclusions("plain") == ()


@pytest.mark.parametrize(
    ("name", "reason", "features"),
    [
        ("counter", "changes the attribute seen of the module", {"pipeline", "microbatches", "tensor"}),
        ("batch_norm", "changes buffer .* of a BatchNorm2d", {"pipeline", "microbatches", "checkpointing", "tensor"}),
        ("closure", "reads a tensor that is not one of its arguments", {"checkpointing"}),
        ("batch_write", "writes into the tensors of its batch", {"pipeline"}),
        (
            "parameter_write",
            "writes into parameter",
            {"pipeline", "microbatches", "checkpointing", "tensor", "context", "shards", "sharded_parameters"},
        ),
        ("metric", "updates the metric", {"pipeline", "tensor"}),
        ("random_drop", "draws from Python's random", {"pipeline", "tensor"}),
        ("stray", "through a reference outside its module", {"pipeline", "tensor", "shards"}),
    ],
)
def test_a_hazard_excludes_the_features_that_it_would_break(name, reason, features):
    assert {item.feature for item in exclusions(name) if re.search(reason, item.reason)} == features


def test_a_reason_is_said_once_for_each_feature():
    found = [(item.feature, item.reason) for item in exclusions("batch_norm")]
    assert len(found) == len(set(found))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x):
        return self.inner(x)


def inside():
    net = Net()
    net.inner[0] = torch.compile(net.inner[0], backend="eager")
    return net


def in_place():
    net = Net()
    net.inner.compile(backend="eager")
    return net


def bound():
    net = Net()
    net.forward = torch.compile(net.forward, backend="eager")
    return net


def marked():
    net = Net()
    net._compiler_ctx = {"compiler": "dynamo"}
    return net


class Method(Net):
    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


@torch.compile(backend="eager")
def double(x):
    return 2 * x


class Calls(Net):
    def forward(self, x):
        return double(super().forward(x))


EVERYWHERE = ["pipeline", "tensor", "sequence"]
INSIDE = ["microbatches", "sharded_parameters"]


@pytest.mark.parametrize(
    ("make", "place", "features"),
    [
        (inside, "inner.0", EVERYWHERE + INSIDE),
        (in_place, "inner", EVERYWHERE),
        (bound, "the module.forward", EVERYWHERE + INSIDE),
        (marked, "the module", EVERYWHERE),
        (lambda: torch.compile(Net(), backend="eager"), "the module", EVERYWHERE),
        (Method, "Method.forward", EVERYWHERE + INSIDE),
        (Calls, "double, which Calls.forward calls,", EVERYWHERE + INSIDE),
    ],
)
def test_what_is_compiled_is_named(make, place, features):
    found = compiled_exclusions(make(), ("inner.0", "inner.1"))
    assert [item.feature for item in found] == features
    assert found[0].reason.startswith(f"{place} is compiled by torch.compile")


def test_what_is_not_rules_out_nothing():
    assert compiled_exclusions(Net()) == ()
