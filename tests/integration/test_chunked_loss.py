"""A loss that a user takes in chunks, each made again in backward, stays one, in the trace and in training."""

import pytest
import torch

from lightning_mist.estimate.replay import replay_plan
from lightning_mist.model import MICROBATCH, SEQUENCE, trace_model
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


def once_more_only(monkeypatch):
    """Of the two implementations the one that the runtime always uses: the other cannot be cut into operators."""
    checkpoint = zoo.checkpoint
    monkeypatch.setattr(zoo, "checkpoint", lambda *args, use_reentrant: checkpoint(*args, use_reentrant=False))


@pytest.fixture
def chunked(monkeypatch):
    once_more_only(monkeypatch)
    torch.manual_seed(0)
    module = zoo.ChunkedLoss(tied=False, vocabulary=zoo.EVEN)
    module.recomputes_blocks = False
    return module


def traced(module, batch, optimizer):
    return trace_model(module, batch, call=zoo.step(module), optimizer=optimizer)


def test_what_is_counted_is_metered(chunked):
    batch = zoo.pair_batch(4)
    spec = traced(chunked, batch, torch.optim.SGD)
    assert metered(chunked, batch) == counted(spec, gradients_exist=False)
    assert metered(chunked, batch) == counted(spec, gradients_exist=True)


def test_the_tail_keeps_no_scores(chunked):
    rows = 16
    batch = zoo.pair_batch(rows)
    in_chunks = traced(chunked, batch, torch.optim.SGD).tail
    whole = traced(zoo.Nano(tied=False, vocabulary=zoo.EVEN), batch, torch.optim.SGD).tail
    at = {MICROBATCH: rows, SEQUENCE: 12}
    scores = rows * 12 * zoo.EVEN * 4
    assert whole.saved_bytes.subs(at) >= scores > 2 * in_chunks.saved_bytes.subs(at)
    assert in_chunks.backward_peak_bytes.subs(at) < whole.backward_peak_bytes.subs(at)
    products = [
        sum(work.flops for work in tail.backward_work if work.kind == "matmul").subs(at) for tail in (in_chunks, whole)
    ]
    assert 2 * products[0] == 3 * products[1]  # one product more beside the two of gradients


@pytest.mark.parametrize(
    "options",
    [{"layers": [4]}, {"layers": [4], "degrees": [2], "zero": 3, "checkpointed": 4}, {"layers": [2, 2], "parts": 2}],
)
def test_what_is_replayed_is_metered(chunked, options):
    batches = [zoo.pair_batch(ROWS) for _ in range(2)]
    spec = traced(chunked, batches[0], torch.optim.AdamW(chunked.parameters()))
    plan = make_plan(rows=ROWS, **options)
    measured = measure_peaks(chunked, spec.module_map, plan, batches[: plan.world_size])
    replays = replay_plan(spec, plan, plain=False)
    for replay, peak in zip(replays, measured, strict=True):
        assert replay.peak_bytes == pytest.approx(peak, rel=0.01)
