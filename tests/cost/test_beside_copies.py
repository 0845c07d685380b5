import numpy as np

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.cost.beside_copies import backward_seconds, beside_copies
from lightning_mist.hardware import catalog_profile, parse_cluster
from tests.specs import spec

CLUSTER = parse_cluster("1x4xL4")
NETWORK = spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500))
MODEL = StageCostModel(NETWORK, catalog_profile(CLUSTER), CLUSTER)
SLOT = StageSlot(stage_index=0, num_stages=1, num_microbatches=4, data_parallel_degree=2, rows=2, batch_rows=8)
STAGES = StageCandidates(
    start_K=np.zeros(6, dtype=np.int64),
    end_K=np.full(6, 4),
    checkpointed_K=np.array([0, 1, 2, 3, 4, 4]),
    zero_stage_K=np.array([0, 1, 2, 3, 0, 1]),
)


def test_a_backward_computes_what_the_stage_model_says():
    compute, seconds = MODEL.region_seconds(2), MODEL.seconds(SLOT, STAGES)
    found = backward_seconds(NETWORK, compute, STAGES)
    assert (found <= seconds.backward_K + seconds.recompute_K + 1e-15).all()
    assert np.diff(found)[:4].min() > 0


def test_what_is_said_without_copies_is_what_the_stage_model_says():
    every = MODEL.region_seconds(2), None
    pair = MODEL.profile, CLUSTER
    found = beside_copies(pair, NETWORK, MODEL.memory(SLOT), SLOT, STAGES, every)
    seconds = MODEL.seconds(SLOT, STAGES)
    assert np.array_equal(found.update_B, seconds.update_K)
    assert np.allclose(found.once.exposed_K, seconds.reduce_K, rtol=1e-12)
    assert np.array_equal(found.once.gather_K, seconds.gather_K)
    compute, network = np.array([1.0, 1.0, 0.0]), np.array([0.5, 4.0, 2.0])
    assert (found.together(compute, network) >= np.maximum(compute, network)).all()
    assert (found.together(compute, network) <= compute + network).all()
