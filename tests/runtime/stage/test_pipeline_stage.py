import copy
import weakref

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.cuts.mapping import map_module
from lightning_mist.plan import Checkpointing
from lightning_mist.runtime.stage.pipeline_stage import PipelineStage, RankStages
from lightning_mist.tensors import copy_batch, slice_rows
from tests import zoo

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def bounds_of(layers, stages):
    return tuple((layers * i // stages, layers * (i + 1) // stages) for i in range(stages))


def calls(modules, batch):
    return [lambda module=module: zoo.step(module)(copy_batch(batch)) for module in modules]


class Pipeline:
    """All stages in one process, each with its own copy of the module, foreign parameters hollow."""

    def __init__(self, name, stages, checkpointed=0, batch=None, bounds=None, kind="full"):
        self.module, make_batch = zoo.make(name)
        self.batch = make_batch(4) if batch is None else batch
        self.map = map_module(self.module, zoo.step(self.module), self.batch, second_batch=slice_rows(self.batch, 0, 3))
        self.bounds = bounds or bounds_of(len(self.map.blocks), stages)
        self.modules = [zoo.make(name)[0] for _ in self.bounds]
        self.stages = [
            PipelineStage(
                module,
                self.map,
                self.bounds,
                index,
                checkpointing=Checkpointing(layers=min(checkpointed, end - first), kind=kind),
            )
            for index, (module, (first, end)) in enumerate(zip(self.modules, self.bounds, strict=True))
        ]
        for stage in self.stages:
            RankStages([stage]).free_foreign()

    def forward(self, batch, signature=None):
        runs, sent = [], ()
        for stage, call in zip(self.stages, calls(self.modules, batch), strict=True):
            with stage.attached():
                specs = stage.input_specs(call, signature)
                received = [tensor.detach().clone() for tensor in sent]
                assert [(s.shape, s.dtype) for s in specs] == [(tuple(t.shape), t.dtype) for t in received]
                output = stage.forward(call, received)
            runs.append((received, output))
            sent = output.tensors
        return runs

    def backward(self, runs, scale=1.0):
        gradients = None
        for received, output in reversed(runs):
            if gradients is None:
                (zoo.loss_of(output.value) * scale).backward()
            else:
                pairs = [(t, g) for t, g in zip(output.tensors, gradients, strict=True) if t.requires_grad]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received]

    def gradients(self):
        total = {}
        for stage in self.stages:
            for name, parameter in stage.parameters.items():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total


def plain_gradients(module, batches):
    losses = []
    for batch in batches:
        loss = zoo.loss_of(zoo.step(module)(copy_batch(batch)))
        (loss / len(batches)).backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, expected):
    for name in {**found, **expected}:
        difference = torch.as_tensor(found.get(name, 0.0) - expected.get(name, 0.0)).abs().max()
        assert difference <= TOLERANCE, (name, float(difference))


def assert_parity(name, stages, checkpointed, kind="full"):
    torch.manual_seed(3)
    _, make_batch = zoo.make(name)
    batches = [make_batch(4), make_batch(3)]
    torch.manual_seed(5)
    losses, expected = plain_gradients(zoo.make(name)[0], batches)
    pipeline = Pipeline(name, stages, checkpointed, batch=batches[0], kind=kind)
    torch.manual_seed(5)
    runs = [pipeline.forward(batch, index) for index, batch in enumerate(batches)]
    for run, loss in zip(runs, losses, strict=True):
        assert zoo.loss_of(run[-1][1].value).item() == pytest.approx(loss, abs=1e-12)
    for run in runs:
        pipeline.backward(run, 1 / len(batches))
    assert_equal_gradients(pipeline.gradients(), expected)


@pytest.mark.sample
@pytest.mark.parametrize("name", zoo.PARITY)
def test_every_layer_a_stage_equals_the_whole(name):
    """Two microbatches of different size, both forwards before the backwards."""
    if name in zoo.TRANSFORMERS:
        pytest.importorskip("transformers")
    assert_parity(name, stages=4, checkpointed=0)


CHECKPOINTED = (
    "gpt2_dropout",
    "llama",
    "bert",
    "vit",
    "t5",
    "mixtral",
    "nano_dropout",
    "tuple_dict",
    "in_place",
    "noise",
)


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_two_stages_with_checkpointing_equal_the_whole(name, kind):
    assert_parity(name, stages=2, checkpointed=9, kind=kind)


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["gpt2_dropout", "nano_dropout", "user_checkpoint"])
@pytest.mark.parametrize(("stages", "checkpointed"), [(1, 0), (1, 2), (1, 9), (3, 1)])
def test_uneven_stages_and_partial_checkpointing_equal_the_whole(name, stages, checkpointed):
    assert_parity(name, stages, checkpointed)


def test_another_sequence_length_than_the_trace():
    pipeline = Pipeline("gpt2", 3)
    batch = {key: value[:2, :7] for key, value in pipeline.batch.items()}
    losses, expected = plain_gradients(zoo.make("gpt2")[0], [batch])
    for signature in ("first", "second"):  # the second time skipped blocks are answered from memory
        run = pipeline.forward(batch, signature)
        assert zoo.loss_of(run[-1][1].value).item() == pytest.approx(losses[0], abs=1e-12)
    pipeline.backward(run)
    assert_equal_gradients(pipeline.gradients(), expected)


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_under_autocast(name):
    torch.set_default_dtype(torch.float32)

    def cast(module):
        step = module.training_step

        def training_step(batch, batch_idx):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return step(batch, batch_idx)

        module.__dict__["training_step"] = training_step
        return module

    batch = zoo.make(name)[1](4)
    losses, expected = plain_gradients(cast(zoo.make(name)[0]), [batch])
    pipeline = Pipeline(name, 2, 1, batch=batch)
    for module in pipeline.modules:
        cast(module)
    run = pipeline.forward(batch)
    assert zoo.loss_of(run[-1][1].value).item() == losses[0]
    pipeline.backward(run)
    found = pipeline.gradients()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=2e-2, atol=1e-3)


def test_evaluation_without_gradients():
    pipeline = Pipeline("nano_dropout", 2, 2)
    for module in pipeline.modules:
        module.eval()
    whole = zoo.make("nano_dropout")[0].eval()
    with torch.no_grad():
        expected = zoo.step(whole)(pipeline.batch)
        run = pipeline.forward(pipeline.batch)
    assert run[-1][1].value.item() == pytest.approx(expected.item(), abs=1e-12)
    assert not any(tensor.requires_grad for received, _ in run for tensor in received)


def test_input_specs_announce_what_comes_and_draw_no_random_numbers():
    pipeline = Pipeline("t5", 2)
    stage, (call,) = pipeline.stages[1], calls(pipeline.modules[1:], pipeline.batch)
    state = torch.get_rng_state()
    with stage.attached():
        specs = stage.input_specs(call, "a")
        assert stage.input_specs(lambda: pytest.fail("the answer is known"), "a") is specs
    assert torch.equal(torch.get_rng_state(), state)
    assert len(specs) == len(pipeline.map.cuts[2])
    assert all(spec.requires_grad and spec.device.type == "cpu" for spec in specs)
    with pipeline.stages[0].attached():
        assert pipeline.stages[0].input_specs(call, "a") == ()


def test_parameters_are_divided_and_hollow_ones_hold_nothing():
    pipeline = Pipeline("gpt2", 2)
    named = dict(pipeline.modules[0].named_parameters())
    first, last = pipeline.stages
    tied = "model.transformer.wte.weight"
    assert set(first.parameters) & set(last.parameters) == {tied}
    assert set(first.parameters) | set(last.parameters) == set(named)
    assert first.parameters[tied] is named[tied]
    assert not set(first.parameters) & set(first.foreign)
    for name, parameter in first.foreign.items():
        assert parameter is named[name]
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        assert parameter.grad is None
        assert bool(parameter.isnan().all())


def test_unused_parameters_stay_with_the_last_stage():
    pipeline = Pipeline("contrastive", 2)
    assert "head.weight" in pipeline.stages[1].parameters
    assert "head.weight" in pipeline.stages[0].foreign


def everything_of(module):
    """Every attribute and every entry of a dictionary among them, by identity."""
    return {
        (name, key, inner): id(item)
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        for inner, item in [(None, value), *(value.items() if isinstance(value, dict) else ())]
    }


@pytest.mark.parametrize("name", ["gpt2", "recurrent", "demo"])
def test_afterwards_the_module_is_as_before(name):
    pipeline = Pipeline(name, 2, 1)
    pipeline.forward(pipeline.batch)  # fills what the model itself caches
    before = everything_of(pipeline.modules[1])
    with pipeline.stages[1].attached():
        assert everything_of(pipeline.modules[1]) != before
    assert everything_of(pipeline.modules[1]) == before


def test_one_stage_runs_the_step_itself():
    module, make_batch = zoo.make("plain")
    batch = make_batch(2)
    found = map_module(module, zoo.step(module), batch)
    stage = PipelineStage(module, found, ((0, 4),), 0)
    before = everything_of(module)
    with stage.attached():
        output = stage.forward(lambda: "anything", ())
    assert everything_of(module) == before
    assert (output.tensors, output.value) == ((), "anything")
    assert not stage.foreign


@pytest.mark.parametrize("stages", [1, 2])
def test_blocks_get_no_cache_that_nothing_reads(stages):
    pipeline = Pipeline("gpt2", stages)
    seen = []
    for block in pipeline.modules[0].model.transformer.h:
        block.attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.extend(type(x).__name__ for x in [*args, *kwargs.values()]), with_kwargs=True
        )
    with pipeline.stages[0].attached():
        pipeline.stages[0].forward(calls(pipeline.modules, pipeline.batch)[0], ())
    assert "DynamicCache" not in seen


def test_a_checkpointed_block_keeps_its_inputs_only():
    def saved_bytes(checkpointed):
        pipeline = Pipeline("nano", 2, checkpointed)
        sizes = {}

        def pack(tensor):
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        stage, (call, *_) = pipeline.stages[0], calls(pipeline.modules, pipeline.batch)
        with stage.attached(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = stage.forward(call, ())
        del output
        return sum(sizes.values())

    none, one, both = (saved_bytes(count) for count in range(3))
    assert none - one == pytest.approx(one - both, rel=0.1)
    assert both < none / 5


def test_leaving_the_step_keeps_no_activation_alive():
    pipeline = Pipeline("plain", 2)
    seen = []
    hook = pipeline.modules[0].blocks[0].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    stage, (call, *_) = pipeline.stages[0], calls(pipeline.modules, pipeline.batch)
    import gc

    gc.disable()
    try:
        with stage.attached(), torch.no_grad():
            output = stage.forward(call, ())
        del output
        assert seen[0]() is None
    finally:
        gc.enable()
        hook.remove()


def stage_and_input(name, index=1):
    pipeline = Pipeline(name, 2)
    run = pipeline.forward(pipeline.batch)
    received = [tensor.detach().clone() for tensor in run[index - 1][1].tensors] if index else []
    return pipeline, pipeline.stages[index], received


def test_a_step_that_skips_a_block_is_an_error():
    pipeline, stage, received = stage_and_input("plain")
    module = pipeline.modules[1]

    def step():
        h = module.first(pipeline.batch["x"])
        for block in list(module.blocks)[1:]:
            h = block(h)
        return module.loss(h, pipeline.batch)

    with stage.attached(), pytest.raises(TraceError, match=r"layer 1 \(blocks\.1\) was called after layer -1"):
        stage.forward(step, received)


def test_a_step_that_returns_early_is_an_error():
    pipeline, stage, _ = stage_and_input("plain", 0)
    module = pipeline.modules[0]

    def step():
        return module.blocks[0](module.first(pipeline.batch["x"]))

    with stage.attached(), pytest.raises(TraceError, match=r"returned after layer 0 without calling layer 2"):
        stage.forward(step, [])


def test_a_last_stage_that_leaves_out_a_block_is_an_error():
    pipeline, stage, received = stage_and_input("plain")
    module = pipeline.modules[1]

    def step():
        h = module.first(pipeline.batch["x"])
        for block in list(module.blocks)[:-1]:
            h = block(h)
        return module.loss(h, pipeline.batch)

    with stage.attached(), pytest.raises(TraceError, match=r"returned after layer 2 without calling layer 3"):
        stage.forward(step, received)


def test_a_result_that_needs_another_stage_is_an_error():
    pipeline, stage, received = stage_and_input("plain")
    module = pipeline.modules[1]

    def step():
        return zoo.step(module)(pipeline.batch) + module.first.weight.sum()

    with stage.attached(), pytest.raises(TraceError, match="depends on a parameter of another stage"):
        stage.forward(step, received)


def test_a_value_that_was_not_carried_is_an_error():
    pipeline, stage, received = stage_and_input("skips")
    module, extra = pipeline.modules[1], pipeline.modules[1].first

    def step():
        try:
            h = extra(pipeline.batch["x"])
            for block in module.blocks:
                h = block(h)
            return module.loss(h, pipeline.batch)
        except Exception:
            return None

    with stage.attached(), pytest.raises(TraceError, match=r"the result of add \(tests\.zoo:\d+.*was not computed"):
        stage.forward(step, received)


def test_a_received_tensor_of_another_shape_is_an_error():
    pipeline, stage, received = stage_and_input("plain")
    (call,) = calls(pipeline.modules[1:], pipeline.batch)
    with (
        stage.attached(),
        pytest.raises(TraceError, match=r"received the output 0 of layer 1 as .* of shape \(3, 16\)"),
    ):
        stage.forward(call, [received[0][:3]])


def test_unfreezing_after_planning_is_an_error():
    module, make_batch = zoo.make("plain")
    module.first.requires_grad_(False)
    for block in list(module.blocks)[:2]:
        block.requires_grad_(False)
    batch = make_batch(3)
    found = map_module(module, zoo.step(module), batch)
    assert [[live.requires_grad for live in cut] for cut in found.cuts] == [[False], [False], [True]]
    stage = PipelineStage(module, found, ((0, 2), (2, 4)), 0)
    module.blocks[1].requires_grad_(True)
    with stage.attached(), pytest.raises(TraceError, match="requires a gradient now and did not in the trace"):
        stage.forward(lambda: zoo.step(module)(batch), ())


def test_what_the_map_excludes_is_refused():
    module, make_batch = zoo.make("peeking")
    found = map_module(module, zoo.step(module), make_batch(3))
    with pytest.raises(TraceError, match=r"2 stages: \.item\(\) at .* Use a plan with one stage"):
        PipelineStage(module, found, ((0, 2), (2, 4)), 0)
    module, make_batch = zoo.make("closure")
    found = map_module(module, zoo.step(module), make_batch(3))
    with pytest.raises(TraceError, match=r"checkpointed_layers = 1: block blocks\.0 reads a tensor that is not one of"):
        PipelineStage(module, found, ((0, 4),), 0, checkpointing=Checkpointing(layers=1))


def test_a_map_of_another_module_is_refused():
    module, make_batch = zoo.make("plain")
    found = map_module(module, zoo.step(module), make_batch(3))
    other = copy.deepcopy(module)
    del other.head.bias
    other.head.bias = None
    with pytest.raises(TraceError, match=r"9 parameters|the map must be of the same module"):
        PipelineStage(other, found, ((0, 4),), 0)


def test_a_stage_is_attached_once():
    pipeline = Pipeline("plain", 2)
    stage, (call, *_) = pipeline.stages[0], calls(pipeline.modules, pipeline.batch)
    with stage.attached(), pytest.raises(RuntimeError, match="attached already"), stage.attached():
        pass
    with pytest.raises(RuntimeError, match="is not attached"):
        stage.forward(call, ())
