from dataclasses import replace

import pytest

from lightning_mist.hardware import Device, catalog_profile, parse_cluster
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.budget import usable_bytes
from lightning_mist.tuner.what_if import MORE_BYTES, Machine, better_machines
from tests.specs import cluster, profile

SPACE = SearchSpace()


def machine(text="2x4xL4", **changes):
    made = parse_cluster(text)
    values = {"memory_limit": None, "host_memory_limit": None, "is_faster": False, **changes}
    return Machine(change="", cluster=made, profile=catalog_profile(made), **values)


def asked(of, rows=32, search=SPACE):
    found, left_out = better_machines(of, global_batch_size=rows, search=search)
    return {item.change: item for item in found}, left_out


def test_each_is_better_in_one_way():
    found, left_out = asked(machine(host_memory_limit=2**35))
    assert list(found) == [
        "1.0 GiB more memory per device",
        "twice the host memory (64.0 GiB per node)",
        "16 devices in place of 8, on 4 nodes",
        "twice the bandwidth between the devices of a node",
        "twice the bandwidth between nodes",
        "twice the bandwidth between devices and their host",
    ]
    assert [item.is_faster for item in found.values()] == [False, False, True, True, True, True]
    assert not left_out


@pytest.mark.parametrize(("limit", "kind"), [(None, "cuda"), (2**34, "cuda"), (None, "cpu")])
def test_more_memory_is_that_much_more_of_the_device(limit, kind):
    here = machine(memory_limit=limit)
    here = replace(here, cluster=replace(here.cluster, device=replace(here.cluster.device, kind=kind)))
    more = next(iter(asked(here)[0].values()))
    grown = Device(name="L4", memory_bytes=here.cluster.device.memory_bytes + MORE_BYTES, kind=kind)
    known = None if limit is None else limit + MORE_BYTES
    expected = usable_bytes(replace(here.cluster, device=grown), known)
    assert usable_bytes(more.cluster, more.memory_limit) == pytest.approx(expected, abs=2)


def test_links_are_twice_as_fast_where_they_are_said_to_be():
    here = machine()
    found, _ = asked(here)
    for name, across in (("the devices of a node", False), ("nodes", True)):
        faster = found[f"twice the bandwidth between {name}"].profile.collectives
        for item, before in zip(faster, here.profile.collectives, strict=True):
            times = 2 if (before.num_nodes > 1) is across else 1
            assert item == replace(before, bytes_per_second=times * before.bytes_per_second)


def test_the_host_is_twice_as_fast_in_both_directions_and_together():
    here = machine()
    faster = asked(here)[0]["twice the bandwidth between devices and their host"].profile
    for name in (
        "host_to_device_bytes_per_second",
        "device_to_host_bytes_per_second",
        "host_bytes_per_second_per_node",
    ):
        assert getattr(faster, name) == 2 * getattr(here.profile, name) > 0


@pytest.mark.parametrize(
    ("text", "rows", "change"),
    [
        ("1x2xL4", 12, "3 devices in place of 2"),
        ("1x2xL4", 16, "4 devices in place of 2"),
        ("4x8xL4", 512, "64 devices in place of 32, on 8 nodes"),
        ("2x8xL4", 48, "24 devices in place of 16, on 3 nodes"),
    ],
)
def test_the_next_larger_machine_deals_the_batch_out_equally(text, rows, change):
    found, _ = asked(machine(text), rows)
    larger = found[change].cluster
    assert rows % larger.world_size == 0
    assert found[change].profile == catalog_profile(larger)


def test_why_a_larger_machine_is_not_asked_about():
    found, left_out = asked(machine("1x2xL4"), 2)
    assert not any("in place of" in change for change in found)
    assert left_out == ("more devices: no number of them up to 8 deals 2 rows out equally",)
    measured = Machine(
        change="", cluster=cluster(2), profile=profile(), memory_limit=None, host_memory_limit=None, is_faster=False
    )
    assert asked(measured, 8)[1] == ("more devices: how a larger machine communicates was not measured",)


def test_links_that_are_not_there_are_not_asked_about():
    found, _ = asked(machine("1x1xL4"), 8, replace(SPACE, offload=()))
    assert list(found) == ["1.0 GiB more memory per device", "2 devices in place of 1"]


def test_what_runs_have_taught_is_kept_on_a_larger_machine():
    here = machine()
    taught = replace(here.profile, overheads=replace(here.profile.overheads, step_seconds=0.5))
    found, _ = asked(replace(here, profile=taught))
    assert found["16 devices in place of 8, on 4 nodes"].profile.overheads.step_seconds == 0.5
