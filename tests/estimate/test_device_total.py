"""From what is reserved to what a device shows as used."""

from lightning_mist.estimate.allocator.allocator_data import malloc
from lightning_mist.estimate.allocator.device_allocator import simulate_allocator
from lightning_mist.estimate.device_need import Communicator, allocator_capacity, device_overheads, workspaces
from lightning_mist.hardware import Cluster, Device
from lightning_mist.hardware.catalog.memory_overheads import NOTHING, communicator_overhead, context_overhead
from lightning_mist.plan.mesh import MESSAGE_CHANNELS

MIB = 2**20


def cluster(name: str, kind: str = "cuda") -> Cluster:
    return Cluster(num_nodes=1, devices_per_node=4, device=Device(name=name, memory_bytes=22 * 2**30, kind=kind))


GROUPS = (Communicator((0, 1, 2, 3)), Communicator((0, 1), is_for_messages=True))


def test_context_and_communicators_add_up() -> None:
    machine = cluster("L4")
    found = device_overheads(machine, GROUPS)
    parts = [context_overhead("L4"), communicator_overhead(machine, 4), communicator_overhead(machine, 2)]
    assert found.outside.expected == sum(part.expected for part in parts)
    assert found.outside.high == sum(part.high for part in parts)
    assert found.workspace_bytes == 8.125 * MIB
    assert allocator_capacity(machine, found) == 22 * 2**30 - found.outside.expected


def test_a_device_alone_has_a_communicator_all_the_same() -> None:
    hopper, other = (device_overheads(cluster(name), ()).communicators for name in ("H200", "L4"))
    assert (hopper.expected, other.expected) == (556 * MIB, 0)
    assert hopper.high == other.high
    assert "not known for L4" in other.source


def test_on_cpu_nothing_comes_on_top() -> None:
    machine = cluster("cpu", "cpu")
    found = device_overheads(machine, GROUPS)
    assert (found.context, found.communicators, found.workspace_bytes) == (NOTHING, NOTHING, 0)
    assert not found.has_allocator
    assert allocator_capacity(machine, found) == machine.device.memory_bytes
    assert workspaces(found.workspace_bytes) == ()


def test_workspaces_are_allocated_once_per_handle_and_stay() -> None:
    events = [*workspaces(32 * MIB), malloc(0, 512), malloc(1, 512)]
    result = simulate_allocator(events)
    assert result.peak_reserved == 2 * 32 * MIB + 2 * MIB


def test_messages_between_stages_hold_the_buffers_of_their_few_channels() -> None:
    machine = cluster("H100")
    pair = Communicator((0, 8), is_for_messages=True)
    both = device_overheads(machine, (pair, pair)).communicators.expected
    assert both == 2 * MESSAGE_CHANNELS * 12 * MIB
    whole = device_overheads(machine, (Communicator((0, 8)),)).communicators.expected
    assert whole > 5 * both
