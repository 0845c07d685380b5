import re

import pytest

from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.plan import plan_of
from lightning_mist.report.draw_map import MOST_BOXES, PALETTE, draw_map, node_kinds, rates


def a_plan(machine, *, layers=64, **degrees):
    return plan_of(layers, world_size=machine.world_size, global_batch_size=8 * machine.world_size, **degrees)


def drawn(plan, machine):
    """The map, its titles of nodes, and its devices as ``(whether the next one touches it, colour, words)``."""
    text = draw_map(plan, machine, [catalog_profile(part) for part in machine.parts])
    titles = re.findall(r'<div class="node">([^<]*)<div>', text)
    squares = re.findall(r'<i( class="joined")? style="background:(#\w+);color:\w+">(.*?)</i>', text)
    return text, titles, [(bool(joined), color, words.split("<br/>")) for joined, color, words in squares]


def test_nodes_that_run_the_same_but_for_rows_are_one_kind():
    machine = parse_cluster("128x8xH100")
    plan = a_plan(machine, pipeline_stages=16, tensor_parallel_degree=4, num_microbatches=32)
    kinds = node_kinds(plan, machine)
    assert len(kinds) == 16
    assert [len(kind.nodes) for kind in kinds] == [8] * 16
    assert sorted(node for kind in kinds for node in kind.nodes) == list(range(128))
    for kind in kinds:
        assert [place.rank for place in kind.places] == list(range(8 * kind.nodes[0], 8 * kind.nodes[0] + 8))
        assert {(place.replica, place.part) for place in kind.places} == {(r, p) for r in range(2) for p in range(4)}
        for place in kind.places:
            assert place.rank in plan.stages[place.group].devices
    assert kinds[0].title == "nodes 0-7 (x 8)"


def test_all_alike_are_drawn_once():
    machine = parse_cluster("128x8xH100")
    _, titles, squares = drawn(a_plan(machine), machine)
    assert titles == ["nodes 0-127 (x 128)"]
    assert [words for _, _, words in squares] == [["stage 0", f"dp {index}"] for index in range(8)]


@pytest.mark.parametrize(
    ("text", "degrees"),
    [
        ("1x1xRTX4090", {}),
        ("1x4xRTX3090", {"pipeline_stages": 4}),
        ("4x8xL4", {"pipeline_stages": 8}),
        ("2x8xA100-40", {"tensor_parallel_degree": 8}),
        ("4x8xL4", {"pipeline_stages": 2, "schedule": "interleaved-1f1b", "chunks": 2}),
    ],
)
def test_every_device_of_what_is_drawn_says_what_it_runs(text, degrees):
    machine = parse_cluster(text)
    plan = a_plan(machine, **degrees)
    found, titles, squares = drawn(plan, machine)
    kinds = node_kinds(plan, machine)
    assert all(words[0].startswith("stage ") for _, _, words in squares)
    assert len(squares) == sum(len(kind.places) for kind in kinds)
    assert {color for _, color, _ in squares} == set(PALETTE[: plan.num_groups])
    assert titles == [kind.title for kind in kinds]
    assert f"<b>{machine.num_nodes} node{'s' * (machine.num_nodes > 1)} of {machine.device.name}</b>" in found
    # What words mean is said where they are used.
    used = {words[at].split()[0] for _, _, words in squares for at in range(1, len(words))}
    assert {word for word in ("dp", "tp") if f" {word}: " in found} == used


def test_links_are_labelled_with_what_was_priced():
    machine = parse_cluster("4x8xL4")
    text, _, _ = drawn(a_plan(machine, pipeline_stages=8, num_microbatches=8), machine)
    profile = catalog_profile(machine)
    (priced,) = {
        cost.bytes_per_second
        for cost in profile.collectives
        if (cost.operation, cost.num_nodes, cost.group_size) == ("send_recv", 2, 2)
    }
    between = rates([profile], 2)
    assert between == f"{priced / 1e6:.0f} MB/s"
    assert f"{between} between nodes" in text
    assert rates([catalog_profile(parse_cluster("1x4xL4"))], 2) == ""


def test_devices_that_share_each_layer_touch():
    machine = parse_cluster("1x8xA100-40")
    _, _, squares = drawn(a_plan(machine, tensor_parallel_degree=2, pipeline_stages=2), machine)
    assert [joined for joined, _, _ in squares] == [True, False] * 4


def test_parts_of_a_mixed_cluster_are_kinds_of_their_own():
    machine = parse_cluster("2x8xA100-40+4x4xV100-32")
    plan = a_plan(machine, pipeline_stages=4, tensor_parallel_degree=2, num_microbatches=32)
    kinds = node_kinds(plan, machine)
    assert [(kind.device, len(kind.nodes)) for kind in kinds] == [
        ("A100-40", 1),
        ("A100-40", 1),
        ("V100-32", 2),
        ("V100-32", 2),
    ]
    assert "<b>6 nodes of A100-40 and V100-32</b>" in drawn(plan, machine)[0]


def test_of_very_many_kinds_the_first_are_drawn():
    machine = parse_cluster("32x8xH100")
    plan = a_plan(machine, pipeline_stages=32, num_microbatches=64)
    text, titles, squares = drawn(plan, machine)
    assert len(titles) == MOST_BOXES
    assert "8 more kinds of nodes are not drawn" in text
    # More stages than the palette has: neighbours differ all the same.
    assert len({color for _, color, _ in squares}) == MOST_BOXES
