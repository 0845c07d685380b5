"""Recomputation by operator, priced stage by stage."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.plan import StageMethod
from tests.specs import cluster, profile, spec, with_splits

NETWORK = with_splits(spec(4), (2, False))
CANDIDATES = StageCandidates(
    start_K=np.zeros(3, dtype=np.int64),
    end_K=np.full(3, 4),
    checkpointed_K=np.array([0, 2, 4]),
    zero_stage_K=np.zeros(3, dtype=np.int64),
)
SLOT = StageSlot(stage_index=0, num_stages=1, num_microbatches=2, data_parallel_degree=1, rows=2, batch_rows=4)


def costs(network, kind, **changes):
    model = StageCostModel(network, profile(), cluster(2))
    slot = replace(SLOT, method=StageMethod(checkpointing=kind), **changes)
    return model.seconds(slot, CANDIDATES), model.memory(slot).peaks(slot, CANDIDATES)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("measured", [False, True])
def test_it_lies_between_keeping_everything_and_recomputing_everything(measured, degree):
    network = with_splits(spec(4, measured=measured), (2, False))
    (full, most), (some, peak_K) = (costs(network, kind, tensor_parallel_degree=degree) for kind in KINDS)
    assert (some.recompute_K[1:] < full.recompute_K[1:]).all()
    assert some.recompute_K[0] == full.recompute_K[0] == 0
    assert some.recompute_K[2] == pytest.approx(2 * some.recompute_K[1])
    assert (most[1:] < peak_K[1:]).all()
    assert peak_K[0] == most[0]
    assert (some.forward_K == full.forward_K).all()
    assert (some.backward_K == full.backward_K).all()


KINDS = ("full", "selective")


def test_measured_layers_repeat_as_much_of_a_forward_as_their_operators_say():
    model = StageCostModel(spec(4, measured=True), profile(), cluster(1))
    rates = StageCostModel(spec(4), profile(), cluster(1))
    share = [m.region_seconds(2, method=StageMethod(checkpointing="selective")) for m in (model, rates)]
    layer = slice(1, -1)
    one, other = (item.recompute_R[layer] / item.forward_R[layer] for item in share)
    assert one == pytest.approx(other)
