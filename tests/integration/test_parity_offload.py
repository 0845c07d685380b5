"""What is kept in host memory changes nothing: curves are those of a single process, whatever is moved."""

import pytest
import torch

from benchmarks.parity.cell import compare_curves, subject
from benchmarks.parity.plans import Group, Layout, make_plan
from lightning_mist.plan import OffloadRatios
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("ended_streams"),
]

STATE = OffloadRatios(optimizer=1.0)
SOME = OffloadRatios(optimizer=0.3)
KEPT = OffloadRatios(activations=1.0)
SOME_KEPT = OffloadRatios(activations=0.3)
BOTH = OffloadRatios(optimizer=1.0, activations=1.0)

PLANS = {
    "one device": Layout(groups=(Group(offload=STATE),)),
    "one device, some": Layout(groups=(Group(offload=SOME, checkpointed=2),), parts=2),
    "data parallel": Layout(groups=(Group(dp=2, offload=STATE),)),
    "ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=SOME),)),
    "ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=STATE),), parts=2),
    "ZeRO 3": Layout(groups=(Group(dp=3, zero=3, offload=STATE),)),
    "tensor parallel": Layout(groups=(Group(tp=2, offload=STATE),)),
    "pipeline": Layout(groups=(Group(dp=2, offload=STATE), Group(dp=2, zero=1, offload=SOME))),
    "chunks": Layout(groups=(Group(offload=STATE),) * 2, schedule="interleaved-1f1b", chunks=2),
    "activations": Layout(groups=(Group(offload=KEPT),)),
    "activations, some, some recomputed": Layout(groups=(Group(offload=SOME_KEPT, checkpointed=2),), parts=2),
    "activations, ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=SOME_KEPT),), parts=2),
    "activations, ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=KEPT, checkpointed=1),), parts=2),
    "activations, tensor parallel": Layout(groups=(Group(tp=2, offload=BOTH),)),
    "activations, pipeline": Layout(groups=(Group(dp=2, offload=BOTH), Group(dp=2, zero=1, offload=KEPT)), parts=2),
    "activations, chunks": Layout(groups=(Group(offload=BOTH),) * 2, schedule="interleaved-1f1b", chunks=2),
    "activations, zero bubble": Layout(groups=(Group(offload=KEPT),) * 2, schedule="zb-h1", parts=2),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", ["nano_even", "lora_llama"])
@pytest.mark.parametrize("label", PLANS)
def test_curves(name, label):
    model = subject(name, torch.float64)
    plan = make_plan(PLANS[label], len(model.module_map.blocks))
    outcome = compare_curves(model, plan)
    assert outcome.differing == ""
    assert outcome.gradient < 1e-12
