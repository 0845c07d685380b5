"""Parameters in parts are whole where somebody wants them whole: evaluation, state dicts, weights loaded in between."""

import pytest
import torch

from benchmarks.parity.cell import on_all_ranks, subject, train_batch
from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist.errors import PlanError
from lightning_mist.plan import OffloadRatios
from tests.integration.parity import make_optimizer
from tests.tiers import tiered

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

MOVED = OffloadRatios(parameters=1.0, optimizer=1.0)

LAYOUTS = {
    "parts": Layout(groups=(Group(tp=2, sequence=True),)),
    "parts of shards": Layout(groups=(Group(dp=2, tp=2, zero=3),)),
    "parts of stages": Layout(groups=(Group(tp=2), Group(dp=2))),
    "offloaded": Layout(groups=(Group(dp=2, offload=MOVED), Group(dp=2, zero=3, offload=MOVED))),
}


def run(label, work):
    model = subject("nano_even", torch.float64)
    return model, on_all_ranks(model, make_plan(LAYOUTS[label], len(model.module_map.blocks)), work)


def begun(engine):
    engine.take_optimizer(make_optimizer(engine.module))
    engine.hollow()
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("label", tiered(LAYOUTS, ["parts of shards"]))
def test_a_module_is_whole_when_filled_and_in_parts_when_hollow(label):
    def work(engine):
        begun(engine)
        shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
        with pytest.raises(PlanError, match=r"state_dict\(\) of a \w+ while rank \d trains stage"):
            engine.module.state_dict()
        engine.fill()
        values = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.hollow()
        assert shapes == {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
        return shapes, values

    model, ranks = run(label, work)
    whole = model.module.state_dict()
    for shapes, values in ranks:
        assert values.keys() == whole.keys()
        assert all(torch.equal(values[name], whole[name]) for name in whole)
        if label == "parts":
            assert shapes["transformer.wte.weight"] == (50, 32)


@pytest.mark.parametrize("label", tiered(LAYOUTS, ["parts of shards"]))
def test_training_goes_on_with_weights_that_were_loaded_in_between(label):
    def work(engine):
        begun(engine)
        train_batch(engine, model.batches[0][engine.rank])
        engine.fill()
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(2.0)
        engine.hollow()
        return engine.module_values()

    model = subject("nano_even", torch.float64)
    _, (values, *others) = run(label, work)
    assert others == [{}] * len(others)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(values[name], 2.0 * parameter)


@pytest.mark.thorough
@pytest.mark.parametrize("label", tiered(LAYOUTS, ["parts of shards"]))
def test_every_rank_finds_an_overflow_that_any_rank_found(label):
    def work(engine):
        begun(engine)
        found = torch.tensor([1.0 if engine.rank == engine.plan.world_size - 1 else 0.0])
        return engine.agree_on_overflow({engine.device: found})[engine.device].item()

    _, answers = run(label, work)
    assert set(answers) == {1.0}
