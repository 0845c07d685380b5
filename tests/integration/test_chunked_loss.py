"""A loss that a user takes in chunks, each made again in backward, stays one, in the trace and in training."""

from copy import deepcopy
from functools import cache

import pytest
import torch

from lightning_mist.estimate.replay import replay_plan
from lightning_mist.model import trace_model
from lightning_mist.model.spec import MICROBATCH, SEQUENCE
from tests import zoo
from tests.integration.metered import measure_peaks
from tests.integration.parity import assert_equal, make_plan, reference, run_plan
from tests.integration.test_counted_and_metered import counted, metered
from tests.integration.test_parity import ROWS, plan_for
from tests.integration.test_parity_tensor import split

# Torch hides this one itself when a fake meets a tensor of the stage, but cannot where warnings are errors.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")

PLANS = {
    "one stage": {"stages": 1},
    "all sharded": {"stages": 1, "degrees": [3], "zero": 3, "checkpointed": 2},
    "gradients sharded": {"stages": 1, "degrees": [2], "zero": 2, "parts": 2},
    "two stages, checkpointed": {"stages": 2, "checkpointed": 1, "parts": 2},
    "zero bubble": {"stages": 2, "schedule": "zb-h1", "parts": 2, "checkpointed": [1, 0]},
    "two groups of two chunks": {"stages": 4, "chunks": 2, "checkpointed": [0, 1, 1, 0]},
    "tensor parallel": {"stages": 1, "tensor": 2, "parts": 2},
    "sequence": {"stages": 1, "tensor": 2, "sequence": True, "checkpointed": 2},
    "two stages, sequence": {"stages": 2, "tensor": 2, "sequence": True, "checkpointed": 1},
    "zero bubble, tensor parallel": {"stages": 2, "tensor": 2, "schedule": "zb-h1", "checkpointed": 1},
}


@pytest.mark.parametrize("label", PLANS)
def test_parity(label):
    module, module_map, batches = split("chunked_loss")
    plan = plan_for(4, **PLANS[label])
    batches = batches[: plan.world_size]
    assert_equal(run_plan(module, module_map, plan, batches), reference(module, batches))


@pytest.fixture
def once_more_only(monkeypatch):
    """Of the two implementations the one that the runtime always uses: the other cannot be cut into operators."""
    checkpoint = zoo.checkpoint
    monkeypatch.setattr(zoo, "checkpoint", lambda *args, use_reentrant: checkpoint(*args, use_reentrant=False))


def traced(module):
    optimizer = torch.optim.AdamW(module.parameters())
    return trace_model(module, zoo.pair_batch(ROWS), call=zoo.step(module), optimizer=optimizer)


@cache
def in_chunks():
    """The model and what it is said to cost."""
    torch.manual_seed(0)
    module = zoo.ChunkedLoss(tied=False, vocabulary=zoo.EVEN)
    module.recomputes_blocks = False
    return module, traced(module)


@pytest.mark.usefixtures("once_more_only")
def test_what_is_counted_is_metered():
    module, spec = in_chunks()
    module, batch = deepcopy(module), zoo.pair_batch(4)
    assert metered(module, batch) == counted(spec, gradients_exist=False)
    assert metered(module, batch) == counted(spec, gradients_exist=True)


@pytest.mark.usefixtures("once_more_only")
def test_the_tail_keeps_no_scores():
    _, spec = in_chunks()
    tails = spec.tail, traced(zoo.Nano(tied=False, vocabulary=zoo.EVEN)).tail
    rows = 16
    at = {MICROBATCH: rows, SEQUENCE: 12}
    scores = rows * 12 * zoo.EVEN * 4
    in_parts, whole = (tail.saved_bytes.subs(at) for tail in tails)
    assert whole >= scores > 2 * in_parts
    in_parts, whole = (tail.backward_peak_bytes.subs(at) for tail in tails)
    assert in_parts < whole
    in_parts, whole = (
        sum(work.flops for work in tail.backward_work if work.kind == "matmul").subs(at) for tail in tails
    )
    assert 2 * in_parts == 3 * whole  # one product more beside the two of gradients


@pytest.mark.usefixtures("once_more_only")
@pytest.mark.parametrize(
    "options",
    [{"layers": [4]}, {"layers": [4], "degrees": [2], "zero": 3, "checkpointed": 4}, {"layers": [2, 2], "parts": 2}],
)
def test_what_is_replayed_is_metered(options):
    module, spec = in_chunks()
    batches = [zoo.pair_batch(ROWS) for _ in range(2)]
    plan = make_plan(rows=ROWS, **options)
    measured = measure_peaks(module, spec.module_map, plan, batches[: plan.world_size])
    replays = replay_plan(spec, plan, plain=False)
    for replay, peak in zip(replays, measured, strict=True):
        assert replay.peak_bytes == pytest.approx(peak, rel=0.01)
