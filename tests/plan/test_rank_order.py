import itertools

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import replica_ranks
from lightning_mist.plan.grid import longest_chain, rank_layout, rank_layouts
from tests.plans import plan_of


def made(degrees, layout):
    stages = [{"devices": ranks, "tensor": tensor} for ranks, (_, tensor) in zip(layout, degrees, strict=True)]
    return plan_of(12, 1, *stages)


DEGREES = [
    *([(data, 1) for data in degrees] for degrees in [(4,), (1, 1), (2, 2), (1, 2), (4, 2, 2), (6, 3, 3)]),
    [(2, 2), (2, 2)],
    [(1, 4), (2, 2)],
    [(4, 1), (2, 2)],
]


@pytest.mark.parametrize("degrees", DEGREES)
def test_the_layout_keeps_stages_together_and_the_last_stage_first(degrees):
    layout = rank_layout(degrees)
    made(degrees, layout)
    assert [rank for ranks in reversed(layout) for rank in ranks] == list(range(sum(map(len, layout))))


@pytest.mark.parametrize("degrees", DEGREES)
def test_another_layout_keeps_replicas_together(degrees):
    near = max(2, *(tensor for _, tensor in degrees))
    layouts = rank_layouts(degrees, near)
    assert layouts[0] == rank_layout(degrees, near)
    found = []
    for layout in layouts:
        plan = made(degrees, layout)
        assert 0 in layout[-1]
        replicas = [replica_ranks(plan, replica) for replica in range(plan.num_replicas)]
        found.append(all(ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in replicas))
    assert any(found)


def test_where_stages_straddle_nodes_they_are_dealt_to_nodes_in_another_layout():
    degrees = [(1, 1), (2, 1), (2, 1), (2, 1), (1, 1)]
    straddling, *others = rank_layouts(degrees, 4)
    assert any(ranks[0] // 4 != ranks[-1] // 4 for ranks in straddling)
    assert any(all(ranks[0] // 4 == ranks[-1] // 4 for ranks in layout) for layout in others)


def test_a_layout_that_degrees_do_not_allow_is_left_out():
    degrees = [(8, 2), (8, 4), (8, 3)]
    layouts = rank_layouts(degrees, 12)
    assert layouts[0] == rank_layout(degrees, 12)
    for layout in layouts:
        for ranks, (data, tensor) in zip(layout, degrees, strict=True):
            groups = [ranks[index * tensor : (index + 1) * tensor] for index in range(data)]
            assert all(group[0] // 12 == group[-1] // 12 for group in groups)


def test_within_a_node_there_is_one_layout():
    assert len(rank_layouts([(2, 1), (2, 1)], 4)) == len(rank_layouts([(2, 1), (2, 1)])) == 1
    assert len(rank_layouts([(2, 1), (2, 1)], 2)) == 2


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_tensor_parallel_ranks_are_in_one_node(per_node):
    kinds = [(data, tensor) for data in (1, 2, 3, 4) for tensor in (1, 2, 4) if tensor <= per_node]
    tried = 0
    for degrees in itertools.product(kinds, repeat=3):
        world = sum(data * tensor for data, tensor in degrees)
        if world % per_node:
            continue
        tried += 1
        layout = rank_layout(degrees, per_node)
        made(degrees, layout)  # Every rank is in one stage.
        assert 0 in layout[-1]
        for ranks, (data, tensor) in zip(layout, degrees, strict=True):
            for index in range(data):
                group = ranks[index * tensor : (index + 1) * tensor]
                assert group == tuple(range(group[0], group[0] + tensor))
                assert group[0] // per_node == group[-1] // per_node
    assert tried > 10


def test_what_fits_into_no_node_is_refused():
    with pytest.raises(
        PlanError, match="must be in one node or fill several; use degrees that divide each other and 3"
    ):
        rank_layout([(3, 2)], 3)


def test_ranks_that_share_layers_fill_nodes_where_there_are_more_than_a_node_has():
    assert rank_layout([(1, 16)], 8) == (tuple(range(16)),)
    # Beside smaller ones they begin where a node does.
    first, second, third = rank_layout([(1, 4), (1, 8), (1, 4)], 4)
    assert (first, second, third) == ((12, 13, 14, 15), tuple(range(4, 12)), (0, 1, 2, 3))
    small, large = rank_layout([(4, 2), (1, 8)], 4)
    assert large[0] % 4 == 0
    assert large == tuple(range(large[0], large[0] + 8))
    assert sorted(small + large) == list(range(16))
    with pytest.raises(PlanError, match="or are multiples of 4"):
        rank_layout([(1, 6), (1, 2)], 4)


def test_chains():
    assert longest_chain([2, 4, 8]) == (2, 4, 8)
    assert longest_chain([2, 3, 6]) == (3, 6)
    assert longest_chain([2, 3]) == (3,)
    assert longest_chain([]) == ()
