"""What a device needs, from allocations or from their peak."""

from dataclasses import replace

import pytest

from lightning_mist.estimate.allocator.allocator_data import MemoryEvent, free, malloc
from lightning_mist.estimate.device_need import SPREADS, DeviceOverheads, replayed_need, summed_need
from lightning_mist.hardware import Cluster, Device
from lightning_mist.hardware.catalog.memory_overheads import NOTHING, Overhead

MIB = 2**20

OVERHEADS = DeviceOverheads(
    context=Overhead(expected=30 * MIB, high=60 * MIB, source=""),
    communicators=Overhead(expected=10 * MIB, high=50 * MIB, source=""),
    workspace_bytes=0,
    has_allocator=True,
)
CPU = DeviceOverheads(context=NOTHING, communicators=NOTHING, workspace_bytes=0, has_allocator=False)

# 30 MiB that are free when 40 MiB are asked for: 70 MiB are reserved if there is room, 40 MiB are needed.
EVENTS: list[MemoryEvent] = [malloc(0, 30 * MIB), free(0), malloc(1, 40 * MIB)]

SPREAD = SPREADS["reserved"].high


def cluster(memory: int, kind: str = "cuda") -> Cluster:
    return Cluster(num_nodes=1, devices_per_node=1, device=Device(name="L4", memory_bytes=memory, kind=kind))


def test_with_room_the_allocator_keeps_what_it_has() -> None:
    found = replayed_need(EVENTS, cluster(10**9), OVERHEADS)
    assert (found.reserved.p50, found.flushes) == (70 * MIB, 0)
    assert found.reserved.p95 == round(SPREAD * 70 * MIB)
    assert found.device_total.p50 == 110 * MIB
    # The two errors are independent.
    apart = ((SPREAD - 1) * 70) ** 2 + 70**2
    assert found.device_total.p95 == pytest.approx((110 + apart**0.5) * MIB)
    assert found.allocated.p50 == 40 * MIB
    assert (found.allocator_bytes, found.context_bytes, found.communicator_bytes) == (30 * MIB, 30 * MIB, 10 * MIB)


def test_a_device_that_would_overflow_is_full_and_runs_if_the_least_fits() -> None:
    # Outside are 40 MiB, seldom more than 110: 150 MiB leave room for the 40 that are needed, not for 70.
    found = replayed_need(EVENTS, cluster(155 * MIB), OVERHEADS, limit=100 * MIB)
    assert (found.device_total.p50, found.flushes) == (80 * MIB, 1)
    assert found.device_total.p95 > 100 * MIB
    small = replace(OVERHEADS, context=NOTHING, communicators=Overhead(expected=40 * MIB, high=41 * MIB, source=""))
    assert replayed_need(EVENTS, cluster(155 * MIB), small, limit=100 * MIB).device_total.p95 == 100 * MIB


def test_where_even_the_least_does_not_fit_the_need_is_above_the_limit() -> None:
    # Not even 40 MiB of tensors have room in 35: what would be comfortable is said.
    found = replayed_need(EVENTS, cluster(75 * MIB), OVERHEADS)
    assert found.device_total.p50 == 110 * MIB
    assert found.device_total.p95 > found.device_total.p50


def test_workspaces_count_as_tensors() -> None:
    found = replayed_need(EVENTS, cluster(10**9), replace(OVERHEADS, workspace_bytes=32 * MIB))
    assert found.allocated.p50 == 40 * MIB + 2 * 32 * MIB


def test_without_allocations_the_ratio_that_was_measured_is_taken() -> None:
    found = summed_need(1000 * MIB, cluster(10**10), OVERHEADS)
    assert found.allocated.p50 == 1000 * MIB
    assert found.reserved.p50 == 1120 * MIB
    assert found.reserved.p95 == pytest.approx(1230 * 1.01 * MIB, rel=1e-4)
    formula = summed_need(1000 * MIB, cluster(10**10), OVERHEADS, is_traced=False)
    assert formula.allocated.p95 == 1250 * MIB
    assert formula.reserved.p95 > found.reserved.p95


def test_where_no_replay_follows_the_interval_is_wider() -> None:
    quick = summed_need(1000 * MIB, cluster(10**10), OVERHEADS)
    found = summed_need(1000 * MIB, cluster(10**10), OVERHEADS, is_final=True)
    assert (found.allocated.p95, found.reserved.p50) == (1060 * MIB, quick.reserved.p50)
    assert found.reserved.p95 == pytest.approx((1300 + 22) * MIB, rel=1e-6)
    # An allocator begins with a segment of 2 MiB and one of 20 MiB.
    small = summed_need(8 * MIB, cluster(10**10), OVERHEADS, is_final=True)
    assert small.reserved.p50 == 22 * MIB
    assert small.reserved.p95 > 44 * MIB


@pytest.mark.parametrize("replayed", [True, False])
def test_on_cpu_what_is_allocated_is_all(replayed: bool) -> None:
    machine = cluster(10**9, "cpu")
    found = replayed_need(EVENTS, machine, CPU) if replayed else summed_need(40 * MIB, machine, CPU)
    assert found.allocated == found.reserved == found.device_total
    assert (found.allocated.p50, found.allocator_bytes, found.context_bytes) == (40 * MIB, 0, 0)


def test_no_allocator_needs_less_than_tensors_and_what_is_outside() -> None:
    exact = replace(OVERHEADS, context=NOTHING, communicators=Overhead(expected=40 * MIB, high=40 * MIB, source=""))
    tensors = round(40 * MIB / SPREADS["allocated"].high)
    for memory in (10**9, 75 * MIB):
        found = replayed_need(EVENTS, cluster(memory), exact)
        assert found.least == pytest.approx(tensors + 40 * MIB, abs=2)
    summed = summed_need(40 * MIB, cluster(10**9), exact, is_final=True)
    assert summed.least == pytest.approx(40 * MIB / SPREADS["summed"].high + 40 * MIB, abs=2)
    assert replayed_need(EVENTS, cluster(10**9), OVERHEADS).least < found.least


def test_what_the_allocator_cannot_give_back_is_needed_too() -> None:
    # Two pieces of 8 MiB share a segment of 20: with one of each gone, no segment can be given back for 100 MiB.
    pieces: list[MemoryEvent] = [malloc(index, 8 * MIB) for index in range(40)]
    pieces += [*(free(index) for index in range(0, 40, 2)), malloc(40, 100 * MIB)]
    exact = replace(OVERHEADS, context=NOTHING, communicators=NOTHING)
    found = replayed_need(pieces, cluster(490 * MIB), exact)
    assert found.allocated.p50 == 320 * MIB
    assert found.least == pytest.approx(500 * MIB / SPREAD, abs=2)


@pytest.mark.parametrize("replayed", [True, False])
def test_on_cpu_the_least_is_of_tensors(replayed: bool) -> None:
    machine = cluster(10**9, "cpu")
    found = replayed_need(EVENTS, machine, CPU) if replayed else summed_need(40 * MIB, machine, CPU)
    assert found.least == round(40 * MIB / SPREADS["allocated"].high)
