from dataclasses import replace

import pytest

from lightning_mist.explain.what_if import MORE_BYTES, Machine, better_machines
from lightning_mist.hardware import Device, Link, MixedCluster, catalog_profile, cluster_of, parse_cluster
from lightning_mist.plan import Plan, StageMesh, StagePlan
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.space.usable_memory import usable_bytes
from tests.specs import cluster, profile

SPACE = SearchSpace(offload=OFFLOADED)


def machine(text="2x4xL4", **changes):
    made = parse_cluster(text)
    values = {"memory_limit": None, "host_memory_limit": None, "is_other": False, **changes}
    return Machine(change="", cluster=made, profiles=tuple(map(catalog_profile, made.parts)), **values)


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
    assert [item.is_other for item in found.values()] == [False, False, True, True, True, True]
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
        faster = found[f"twice the bandwidth between {name}"].profiles[0].collectives
        for item, before in zip(faster, here.profiles[0].collectives, strict=True):
            times = 2 if (before.num_nodes > 1) is across else 1
            assert item == replace(before, bytes_per_second=times * before.bytes_per_second)


def test_the_host_is_twice_as_fast_in_both_directions_and_together():
    here = machine()
    faster = asked(here)[0]["twice the bandwidth between devices and their host"].profiles[0]
    for name in (
        "host_to_device_bytes_per_second",
        "device_to_host_bytes_per_second",
        "host_bytes_per_second_per_node",
    ):
        assert getattr(faster, name) == 2 * getattr(here.profiles[0], name) > 0


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
    assert found[change].profiles == (catalog_profile(larger),)


def test_why_a_larger_machine_is_not_asked_about():
    found, left_out = asked(machine("1x2xL4"), 2)
    assert not any("in place of" in change for change in found)
    assert left_out == ("more devices: no number of them up to 8 deals 2 rows out equally",)
    measured = Machine(
        change="", cluster=cluster(2), profiles=(profile(),), memory_limit=None, host_memory_limit=None, is_other=False
    )
    assert asked(measured, 8)[1] == ("more devices: how a larger machine communicates was not measured",)


def test_links_that_are_not_there_are_not_asked_about():
    found, _ = asked(machine("1x1xL4"), 8, replace(SPACE, offload=()))
    assert list(found) == ["1.0 GiB more memory per device", "2 devices in place of 1"]


def test_what_runs_have_taught_is_kept_on_a_larger_machine():
    here = machine()
    taught = replace(here.profiles[0], overheads=replace(here.profiles[0].overheads, step_seconds=0.5))
    found, _ = asked(replace(here, profiles=(taught,)))
    assert found["16 devices in place of 8, on 4 nodes"].profiles[0].overheads.step_seconds == 0.5


def mixed(**changes):
    made = cluster_of([parse_cluster("1x8xA100-40"), parse_cluster("2x8xV100-16")], **changes)
    return Machine(
        change="",
        cluster=made,
        profiles=tuple(map(catalog_profile, made.parts)),
        memory_limit=None,
        host_memory_limit=None,
        is_other=False,
    )


def test_unlike_devices_all_get_more_memory():
    here = mixed()
    more = next(iter(asked(here, 48)[0].values()))
    assert more.is_other
    before = [part.device.memory_bytes for part in here.cluster.parts]
    assert [part.device.memory_bytes for part in more.cluster.parts] == [size + MORE_BYTES for size in before]


def test_of_unlike_nodes_the_kind_is_added_of_which_fewest_are_needed():
    found, _ = asked(mixed(), 32)
    larger = found["32 devices in place of 24 (2x8xA100-40+2x8xV100-16)"].cluster
    assert [part.num_nodes for part in larger.parts] == [2, 2]


def test_a_link_between_unlike_parts_is_faster_too():
    here = mixed(link=Link(bytes_per_second=1e9, latency_seconds=1e-5))
    faster = asked(here, 48)[0]["twice the bandwidth between nodes"]
    assert faster.cluster.link.bytes_per_second == 2e9
    assert all(len(item.profiles) == 2 for item in asked(here, 48)[0].values())


@pytest.mark.parametrize("limit", [None, 20 * 2**30])
def test_every_stage_has_what_its_devices_may_use(limit):
    here = replace(mixed(), memory_limit=limit)
    there = [part.device.memory_bytes for part in here.cluster.parts]
    usable = [0.8 * min(size, limit or size) for size in there]
    assert usable[0] > usable[1]
    stages = [
        StagePlan(
            layers=(at, at + 1),
            mesh=StageMesh(devices=devices, data_parallel_degree=len(devices)),
            microbatch_size=48 // len(devices),
        )
        for at, devices in enumerate((tuple(range(8, 24)), tuple(range(8))))
    ]
    plan = Plan(global_batch_size=144, num_microbatches=3, stages=tuple(stages))
    assert here.limits(plan) == pytest.approx(usable[::-1])
    assert here.host_limits(plan) == pytest.approx([0.8 * 61 * 2**30, 0.8 * 144 * 2**30])
    assert replace(here, host_memory_limit=2**33).host_limits(plan) == (2**30,) * 2
    everywhere = StageMesh(devices=tuple(range(24)), data_parallel_degree=24)
    alone = Plan(
        global_batch_size=144,
        num_microbatches=3,
        stages=(StagePlan(layers=(0, 2), mesh=everywhere, microbatch_size=2),),
    )
    assert here.limits(alone) == pytest.approx([usable[1]])
    assert here.host_limits(alone) == pytest.approx([0.8 * 61 * 2**30])


def test_without_a_limit_the_host_memory_that_plans_use_is_doubled():
    found, _ = asked(machine())
    twice = found["twice the host memory (614.4 GiB per node)"]
    assert (twice.host_memory_limit, twice.is_other) == (2 * round(0.8 * 4 * 96 * 2**30), False)
    assert not any("host memory" in change for change in asked(machine(), search=replace(SPACE, offload=()))[0])
    unlike, _ = asked(mixed(), 48)
    twice = unlike["twice the host memory"]
    assert [part.host_memory_bytes for part in twice.cluster.parts] == [2 * 1152 * 2**30, 2 * 488 * 2**30]
    assert (twice.host_memory_limit, twice.is_other) == (None, True)


def test_host_memory_that_is_not_known_is_not_doubled():
    unknown = Machine(
        change="", cluster=cluster(2), profiles=(profile(),), memory_limit=None, host_memory_limit=None, is_other=False
    )
    assert not any("host memory" in change for change in asked(unknown, 8)[0])
    parts = tuple(cluster(count) for count in (1, 2))
    unlike = replace(unknown, cluster=MixedCluster(parts=parts), profiles=(profile(), profile()))
    assert not any("host memory" in change for change in asked(unlike, 9)[0])
