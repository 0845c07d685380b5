import copy
from dataclasses import replace

import pytest
import torch

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.plan import StageMesh
from lightning_mist.runtime.executor import Executor, Microbatch
from lightning_mist.runtime.gradients.weight_gradients import WeightGradients
from lightning_mist.runtime.stage.pipeline_stage import PipelineStage
from lightning_mist.schedule import ActionKind
from tests import zoo
from tests.integration.parity import Rank, actions_of, loss_of, make_plan, map_of, microbatches
from tests.memory_transport import InMemoryWorld, drive

FORWARD_ONLY = {
    ActionKind.RECV_ACTIVATION,
    ActionKind.FORWARD,
    ActionKind.SEND_ACTIVATION,
}


class World:
    """All ranks of a plan for a small model, with batches."""

    def __init__(self, plan, name="plain", rows=4, wrap=lambda transport: transport):
        self.plan = plan
        self.module, make_batch = zoo.make(name)
        self.batches = [make_batch(rows) for _ in range(plan.world_size)]
        self.module_map = map_of(self.module, self.batches[0])
        self.transports = InMemoryWorld(plan.world_size)
        self.ranks = [
            Rank.make(copy.deepcopy(self.module), self.module_map, plan, rank, wrap(transport))
            for rank, transport in enumerate(self.transports.transports)
        ]
        self.parts = [microbatches(plan, rank, self.batches) for rank in range(plan.world_size)]

    def run(self, step=None):
        drive(
            [
                rank.executor.run(parts, rank.step if step is None else (lambda part, rank=rank: step(rank, part)))
                for rank, parts in zip(self.ranks, self.parts, strict=True)
            ]
        )


@pytest.mark.parametrize("wrap", [lambda loss: {"loss": loss, "extra": 1}, lambda loss: {"loss": loss}])
def test_a_step_may_return_a_dictionary(wrap):
    plain, wrapped = World(make_plan([2, 2])), World(make_plan([2, 2]))
    wrapped.batches = plain.batches
    wrapped.parts = plain.parts
    plain.run()
    wrapped.run(lambda rank, part: wrap(rank.step(part)))
    for a, b in zip(plain.ranks, wrapped.ranks, strict=True):
        for name, gradient in a.gradients().items():
            assert torch.equal(gradient, b.gradients()[name])
    assert isinstance(wrapped.ranks[1].executor.outputs[0], dict)
    assert plain.ranks[0].executor.outputs == [None, None]


def test_a_step_without_a_loss_contributes_nothing():
    both, first = World(make_plan([2, 2])), World(make_plan([2, 2]))
    first.batches, first.parts = both.batches, both.parts
    both.run()
    half = copy.deepcopy(both.ranks[1].gradients())
    first.run(lambda rank, part: rank.step(part) if part.index == 0 else (rank.step(part), None)[1])
    none = World(make_plan([2, 2]))
    none.run(lambda rank, part: (rank.step(part), None)[1])
    assert first.ranks[1].executor.outputs[1] is None
    assert any(not torch.equal(half[name], gradient) for name, gradient in first.ranks[1].gradients().items())
    assert all(gradient is None for gradient in none.ranks[1].gradients().values())
    assert all(gradient is None or not gradient.any() for gradient in none.ranks[0].gradients().values())


def test_another_kind_of_loss_is_refused():
    with pytest.raises(TraceError, match="the step returned a str as its loss"):
        World(make_plan([4])).run(lambda rank, part: "loss")


def test_gradients_of_earlier_batches_must_be_put_aside():
    world = World(make_plan([4]))
    world.run()
    with pytest.raises(ValueError, match="has a gradient: put gradients of earlier batches aside"):
        world.run()


def test_microbatches_must_be_those_of_the_plan():
    world = World(make_plan([2, 2]))
    world.parts = [parts[:1] for parts in world.parts]
    with pytest.raises(ValueError, match=r"microbatches \[0\]: the plan has 2"):
        world.run()


def test_a_batch_without_rows_cannot_be_cut():
    world = World(make_plan([2, 2], parts=2))
    world.parts = [
        [
            Microbatch(value=part.value, weight=part.weight, owner=part.owner, index=part.index, batch_rows=None)
            for part in parts
        ]
        for parts in world.parts
    ]
    with pytest.raises(PlanError, match="which has no rows to count"):
        world.run()


def test_a_list_without_backwards_evaluates_and_keeps_no_graph():
    world = World(make_plan([2, 2], degrees=[1, 2]))
    for rank in world.ranks:
        rank.executor.actions = tuple(action for action in rank.executor.actions if action.kind in FORWARD_ONLY)
    with torch.no_grad():
        world.run()
    expected = [world.module.training_step(batch, 0).item() for batch in world.batches]
    found = [0.0] * 3
    for rank, parts in zip(world.ranks, world.parts, strict=True):
        for owner, loss in rank.losses(parts).items():
            found[owner] += loss.item()
        assert all(parameter.grad is None for parameter in rank.module.parameters())
        assert not any(output is not None and loss_of(output).requires_grad for output in rank.executor.outputs)
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_error_in_the_step_reaches_the_caller_and_leaves_the_module_usable():
    world = World(make_plan([2, 2]))

    def fail(rank, part):
        if rank.executor.mesh.stage == 1 and part.index == 1:
            raise RuntimeError("the user's own")
        return rank.step(part)

    with pytest.raises(RuntimeError, match="the user's own"):
        world.run(fail)
    for rank in world.ranks:
        named = dict(rank.module.named_parameters())
        assert all(named[name] is parameter for name, parameter in rank.executor.stages.parameters.items())
        assert all(named[name] is parameter for name, parameter in rank.executor.stages.foreign.items())


def test_a_plan_that_cannot_run_is_refused():
    plan = make_plan([4], degrees=[2])
    mesh = StageMesh(devices=(0, 1), context_parallel_degree=2)
    plan = replace(plan, stages=(replace(plan.stages[0], mesh=mesh, microbatch_size=8),))
    module, make_batch = zoo.make("plain")
    module_map = map_of(module, make_batch(4))
    stage = PipelineStage(module, module_map, plan.bounds, 0)
    with pytest.raises(PlanError, match=r"stages\[0\]\.context_parallel_degree = 2"):
        Executor(plan, 0, [stage], module_map, InMemoryWorld(2).transports[0], actions_of(plan, module_map, 0))


def test_the_weights_of_a_stage_wait_for_their_w(monkeypatch):
    """Between I and W the linear weights have no gradient of the microbatch; norms, biases and embeddings have."""
    world = World(make_plan([2, 2], schedule="zb-h1"), "gpt2")
    waited, present = [], []
    run = WeightGradients.run

    def recording(self, key):
        waited.append((key, self.names(key)))
        present.append({name for name, p in self.parameters.items() if p.grad is not None})
        run(self, key)

    monkeypatch.setattr(WeightGradients, "run", recording)
    world.run()
    names = {key: set() for key, _ in waited}
    for key, found in waited:
        names[key] |= found
    linear = {f"model.transformer.h.{k}.{part}.weight" for k in range(4) for part in _GPT2_LINEAR}
    # The head's weight is the embedding's.
    assert names[0] == names[1] == linear | {"model.transformer.wte.weight"}
    assert not present[0] & linear
    assert any(name.endswith("ln_1.weight") for name in present[0])


_GPT2_LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
