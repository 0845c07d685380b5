from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.plan import plan_of
from lightning_mist.report.draw_map import MOST_BOXES, PALETTE, map_figure, node_kinds, rates


def a_plan(machine, *, layers=64, **degrees):
    return plan_of(layers, world_size=machine.world_size, global_batch_size=8 * machine.world_size, **degrees)


def drawn(plan, machine):
    profiles = [catalog_profile(part) for part in machine.parts]
    figure = map_figure(plan, machine, profiles)
    (axis,) = figure.axes
    texts = [text.get_text() for text in axis.texts]
    return figure, axis, texts


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
    _, axis, texts = drawn(a_plan(machine), machine)
    assert "nodes 0-127 (x 128)" in texts
    assert texts.count("stage 0\ncopy 3") == 1
    assert not axis.lines


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
    figure, axis, texts = drawn(plan, machine)
    kinds = node_kinds(plan, machine)
    words = [item for item in texts if item.startswith("stage ")]
    assert len(words) == sum(len(kind.places) for kind in kinds)
    colors = {to_hex(patch.get_facecolor()) for patch in axis.patches if patch.get_fill()}
    assert colors == set(PALETTE[: plan.num_groups])
    assert len([item for item in texts if item.startswith("node")]) == len(kinds)
    head = figure.texts[0].get_text()
    assert head == f"{machine.num_nodes} node{'s' * (machine.num_nodes > 1)} of {machine.device.name}"


def test_links_are_labelled_with_what_was_priced():
    machine = parse_cluster("4x8xL4")
    plan = a_plan(machine, pipeline_stages=8, num_microbatches=8)
    figure, axis, texts = drawn(plan, machine)
    profile = catalog_profile(machine)
    (priced,) = {
        cost.bytes_per_second
        for cost in profile.collectives
        if (cost.operation, cost.num_nodes, cost.group_size) == ("send_recv", 2, 2)
    }
    between = rates([profile], 2)
    assert between == f"{priced / 1e6:.0f} MB/s"
    assert texts.count(between) == len(axis.lines) == 3
    assert f"{between} between nodes" in figure.texts[1].get_text()
    assert rates([catalog_profile(parse_cluster("1x4xL4"))], 2) == ""


def test_devices_that_share_each_layer_touch():
    machine = parse_cluster("1x8xA100-40")
    _, axis, _ = drawn(a_plan(machine, tensor_parallel_degree=2, pipeline_stages=2), machine)
    squares = sorted((patch.get_y(), patch.get_x(), patch.get_width()) for patch in axis.patches if patch.get_fill())
    gaps = [round(right[1] - left[1] - left[2], 6) for left, right in pairwise(squares) if left[0] == right[0]]
    # Pairs of devices, in two rows of four.
    touching = [gap <= 1e-6 for gap in gaps]
    assert touching == [True, False, True] * 2


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
    figure, _, _ = drawn(plan, machine)
    assert figure.texts[0].get_text() == "6 nodes of A100-40 and V100-32"


def test_of_very_many_kinds_the_first_are_drawn():
    machine = parse_cluster("32x8xH100")
    plan = a_plan(machine, pipeline_stages=32, num_microbatches=64)
    figure, axis, texts = drawn(plan, machine)
    assert len([item for item in texts if item.startswith("node")]) == MOST_BOXES
    assert "8 more kinds of nodes are not drawn" in figure.texts[1].get_text()
    # More stages than the palette has: neighbours differ all the same.
    assert len({to_hex(patch.get_facecolor()) for patch in axis.patches if patch.get_fill()}) == MOST_BOXES
