"""What is put together of single kinds of state is what is counted for all of them at once."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from lightning_mist.cost import MemoryModel, StageCandidates, StageSlot
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.cost.memory.offload_bytes import OffloadParts, Ratios
from tests.specs import spec

NETWORK = spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500), tied=True)
LARGE = spec(4, parameter_bytes=40_000_000)
# One unit, of more bytes than a bucket holds.
LARGE = replace(LARGE, module_map=LARGE.module_map.excluding("a test", "shards")).evenly()
RATIOS = Ratios(
    parameters=(0.0, 0.5, 1.0),
    gradients=(0.0, 0.3, 1.0),
    optimizer=(0.0, 0.9),
    kept=((0.0, 0.0), (0.25, 0.25), (0.0, 1.0), (0.5, 0.25), (1.0, 0.5)),
)


def stages(index, count):
    bounds = [
        (start, end)
        for start, end in itertools.combinations(range(5), 2)
        if (start == 0) == (index == 0) and (end == 4) == (index == count - 1)
    ]
    rows = [(*item, kept, zero) for item in bounds for kept in range(item[1] - item[0] + 1) for zero in range(4)]
    names = ("start_K", "end_K", "checkpointed_K", "zero_stage_K")
    return StageCandidates(**dict(zip(names, np.array(rows).T, strict=True)))


def slot_of(index, count, **given):
    sizes = {"num_microbatches": 6, "data_parallel_degree": 2, "rows": 2, "batch_rows": 12}
    return StageSlot(stage_index=index, num_stages=count, **{**sizes, **given})


@pytest.mark.parametrize("network", [NETWORK, NETWORK.evenly()], ids=["dealt", "even"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("index", "count", "degree"), [(0, 1, 2), (0, 3, 3), (1, 3, 1), (2, 3, 2), (1, 4, 2)])
def test_peaks_and_host_memory(index, count, degree, schedule, network):
    check(index, count, degree, schedule, network)


def test_units_of_zero_1_may_be_larger_than_buckets():
    parts, is_zero_1 = check(0, 2, 2, "1f1b", LARGE), stages(0, 2).zero_stage_K == 1
    joined = (parts.resident.update_K + parts.resident.always_K).reshape(parts.unjoined_SCC.shape)
    larger = (parts.unjoined_SCC > joined).any(axis=(1, 2))
    assert larger[is_zero_1].any()
    assert not larger[~is_zero_1].any()


def check(index, count, degree, schedule, network):
    model, slot = MemoryModel(network), slot_of(index, count, data_parallel_degree=degree, schedule=schedule)
    some, moments = stages(index, count), device_moments(index, count, 6, schedule)
    parts = OffloadParts.of(model, slot, some, RATIOS)
    updated = itertools.product(RATIOS.parameters, RATIOS.gradients, RATIOS.optimizer)
    combinations = np.array([(*some, *kept) for some, kept in itertools.product(updated, RATIOS.kept)])
    whole = some.take(np.repeat(np.arange(len(some)), len(combinations)))
    whole = replace(whole, offload=OffloadCandidates.of_kinds(np.tile(combinations, (len(some), 1))))
    needs = model.needs(slot, whole)
    assert parts.peaks(moments).shape == (len(some), *RATIOS.shape)
    assert parts.peaks(moments).reshape(-1) == pytest.approx(needs.peaks(moments), rel=1e-12)
    hosts = needs.host_bytes(moments)
    assert parts.host_bytes(moments).reshape(-1) == pytest.approx(hosts, rel=1e-12, abs=1e-6)
    return parts


def test_some_of_several():
    model, moments = MemoryModel(NETWORK.evenly()), device_moments(1, 3, 6)
    every = OffloadParts.of(model, slot_of(1, 3), stages(1, 3), RATIOS)
    at = np.array([len(every) - 1, 0, 2])
    assert np.array_equal(every.take(at).peaks(moments), every.peaks(moments)[at])
    assert np.array_equal(every.take(at).host_bytes(moments), every.host_bytes(moments)[at])
