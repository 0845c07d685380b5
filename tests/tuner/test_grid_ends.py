"""What stages at the ends of grids hold and take is the same as when it is asked for by itself."""

import dataclasses

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory.phases import stage_phases
from lightning_mist.tuner import grid_ends
from lightning_mist.tuner.grid_ends import KnownEnds
from tests.specs import cluster, profile, spec

MODEL = StageCostModel(
    spec(8, parameter_bytes=4000, edge_bytes=4000, measured=True, widths=(4000,)),
    dataclasses.replace(
        profile(link=1e7, latency=1e-4), host_to_device_bytes_per_second=1e9, device_to_host_bytes_per_second=2e9
    ),
    cluster(8),
)


def slot(index, *, stages=2, microbatches=4, rows=2, data=4):
    return StageSlot(
        stage_index=index,
        num_stages=stages,
        num_microbatches=microbatches,
        data_parallel_degree=data,
        rows=rows,
        batch_rows=rows * microbatches * data // 8,
        replicas=data,
    )


def settings(index, *, moved=False):
    zero_K = np.repeat(np.arange(4), 5)
    ratio_K = np.linspace(0.0, 1.0, 20)
    return StageCandidates(
        start_K=np.full(20, 4 * index),
        end_K=np.full(20, 4 * index + 4),
        checkpointed_K=np.tile(np.arange(5), 4),
        zero_stage_K=zero_K,
        offload=OffloadCandidates(
            parameters_K=ratio_K, gradients_K=0 * ratio_K, optimizer_K=ratio_K, activations_K=0.5 * ratio_K
        )
        if moved
        else None,
    )


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_what_is_kept_serves_batches_of_all_sizes(index, moved):
    known, candidates = KnownEnds(), settings(index, moved=moved)
    for microbatches in (4, 8, 2, 16):
        place = slot(index, microbatches=microbatches)
        phases = stage_phases(index, 2, microbatches, "1f1b")
        wanted_K = MODEL.memory(place).needs(place, candidates).peaks(phases)
        assert known.peaks(MODEL, place, candidates) == pytest.approx(wanted_K)
        seconds = MODEL.seconds(place, candidates)
        wanted_K = microbatches * (seconds.steady_K - seconds.transfer_K) - seconds.accumulate_K
        assert known.busy(MODEL, place, candidates) == pytest.approx(wanted_K)


@pytest.mark.parametrize("other", [{"rows": 1}, {"data": 2}, {"microbatches": 1}])
def test_what_differs_is_told_apart(other):
    known, candidates = KnownEnds(), settings(0)
    known.peaks(MODEL, slot(0), candidates), known.busy(MODEL, slot(0), candidates)
    place = slot(0, **other)
    assert known.peaks(MODEL, place, candidates).tolist() == KnownEnds().peaks(MODEL, place, candidates).tolist()
    assert known.busy(MODEL, place, candidates).tolist() == KnownEnds().busy(MODEL, place, candidates).tolist()


def test_nothing_is_worked_out_twice(monkeypatch):
    asked, real = [], grid_ends.PeakParts.of
    monkeypatch.setattr(grid_ends.PeakParts, "of", lambda needs: asked.append(needs) or real(needs))
    known = KnownEnds()
    for microbatches in (4, 8):
        known.peaks(MODEL, slot(0, microbatches=microbatches), settings(0))
    assert len(asked) == 1
    known.peaks(MODEL, slot(1), settings(1))
    assert len(asked) == 2


@pytest.mark.parametrize(
    "other", [{"context_parallel_degree": 2}, {"replicas": 1}, {"parts": (0, 1)}, {"data_parallel_degree": 2}]
)
def test_stages_of_other_devices_are_kept_apart(other):
    place, candidates = slot(0), settings(0)
    key = grid_ends._key(place, candidates)
    assert key == grid_ends._key(dataclasses.replace(place, num_microbatches=8, batch_rows=8), candidates)
    assert key != grid_ends._key(dataclasses.replace(place, **other), candidates)
