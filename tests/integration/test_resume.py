"""What one plan has trained another goes on with, through the values and the optimizer state that checkpoints hold."""

import copy

import pytest
import torch

from benchmarks.parity.cell import CLIP_NORM, on_all_ranks, subject, train_batch
from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from tests.integration.parity import loss_of, make_optimizer, precision_of

pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

STEPS = 3
WORLD = 4

PLANS = {
    "data parallel": Layout(groups=(Group(dp=4),)),
    "two by two": Layout(groups=(Group(dp=2, zero=1),) * 2),
    "ZeRO 3": Layout(groups=(Group(dp=4, zero=3),)),
    "hybrid, ZeRO 1": Layout(groups=(Group(dp=4, zero=1, shard=2),)),
    "hybrid, ZeRO 3": Layout(groups=(Group(dp=4, zero=3, shard=2),)),
    "tensor parallel": Layout(groups=(Group(tp=2, sequence=True),) * 2),
    "tensor parallel, ZeRO 3": Layout(groups=(Group(dp=2, tp=2, zero=3),)),
    "offloaded": Layout(groups=(Group(dp=4, zero=1, offload=OffloadRatios(optimizer=1.0, parameters=0.3)),)),
    "chunks": Layout(groups=(Group(dp=2, zero=2),) * 2, schedule="interleaved-1f1b", chunks=2),
    "pipeline, ZeRO 3 and ZeRO 2": Layout(groups=(Group(dp=2, zero=3), Group(dp=2, zero=2))),
}

PAIRS = [
    ("data parallel", "ZeRO 3"),
    ("ZeRO 3", "two by two"),
    ("two by two", "pipeline, ZeRO 3 and ZeRO 2"),
    ("pipeline, ZeRO 3 and ZeRO 2", "tensor parallel"),
    ("tensor parallel", "tensor parallel, ZeRO 3"),
    ("tensor parallel, ZeRO 3", "chunks"),
    ("tensor parallel", "offloaded"),
    ("offloaded", "ZeRO 3"),
    ("chunks", "tensor parallel"),
    ("ZeRO 3", "hybrid, ZeRO 1"),
    ("hybrid, ZeRO 1", "hybrid, ZeRO 3"),
    ("hybrid, ZeRO 3", "offloaded"),
]


def steps(engine, model, numbers, *, state=None, values=None):
    """Clipped steps; on rank 0 all values and the optimizer's state after them."""
    optimizer = make_optimizer(engine.module)
    if values is not None:
        with torch.no_grad():
            for name, parameter in engine.module.named_parameters():
                parameter.copy_(values[name])
    engine.take_optimizer(optimizer)
    engine.hollow()
    if state is not None:
        engine.load_optimizer_state(copy.deepcopy(state))
    for number in numbers:
        optimizer.zero_grad()
        train_batch(engine, model.batches[number % 2][engine.rank])
        engine.clip_by_norm(optimizer, CLIP_NORM)
        optimizer.step()
        complete(engine.executor.gather_parameters())
    return engine.module_values(), engine.optimizer_state()


@pytest.mark.sample
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_plan_goes_on(first, second):
    name = ("nano_even", "lora_llama")[PAIRS.index((first, second)) % 2]
    model = subject(name, torch.float64)
    layers = len(model.module_map.blocks)
    plans = [make_plan(PLANS[label], layers) for label in (first, second)]
    assert [plan.world_size for plan in plans] == [WORLD, WORLD]
    (values, state), *others = on_all_ranks(model, plans[0], lambda e: steps(e, model, range(STEPS)))
    assert others == [({}, {})] * (WORLD - 1)
    again = on_all_ranks(
        model, plans[1], lambda e: steps(e, model, range(STEPS, 2 * STEPS), state=state, values=values)
    )
    wanted, wanted_state = straight(model)
    for key, value in wanted.items():
        torch.testing.assert_close(again[0][0][key], value, rtol=1e-10, atol=1e-10)
    assert again[0][1]["param_groups"] == wanted_state["param_groups"]
    assert again[0][1]["state"].keys() == wanted_state["state"].keys()
    for number, entry in wanted_state["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(again[0][1]["state"][number][key], value, rtol=1e-10, atol=1e-12)


def straight(model):
    """All steps in a single process."""
    module = copy.deepcopy(model.module)
    optimizer = make_optimizer(module)
    for number in range(2 * STEPS):
        optimizer.zero_grad()
        for batch in model.batches[number % 2][:WORLD]:
            with precision_of(module):
                (loss_of(module.training_step(copy.copy(batch), 0)) / WORLD).backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP_NORM)
        optimizer.step()
    return dict(module.named_parameters()), optimizer.state_dict()
