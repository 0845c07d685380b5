import itertools

import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, StageMesh, StagePlan, replica_ranks
from lightning_mist.plan.layout import longest_chain, rank_layout


def plan_of(degrees, layout):
    stages = tuple(
        StagePlan(
            layers=(index, index + 1),
            mesh=StageMesh(devices=ranks, data_parallel_degree=data, tensor_parallel_degree=tensor),
            microbatch_size=12 // data,
        )
        for index, (ranks, (data, tensor)) in enumerate(zip(layout, degrees, strict=True))
    )
    return Plan(global_batch_size=12, num_microbatches=1, stages=stages)


@pytest.mark.parametrize(
    "degrees",
    [
        *([(data, 1) for data in degrees] for degrees in [(4,), (1, 1), (2, 2), (1, 2), (4, 2, 2), (6, 3, 3)]),
        [(2, 2), (2, 2)],
        [(1, 4), (2, 2)],
        [(4, 1), (2, 2)],
    ],
)
def test_the_layout_keeps_replicas_together_and_the_last_stage_first(degrees):
    layout = rank_layout(degrees)
    plan = plan_of(degrees, layout)
    assert layout[-1][0] == 0
    for replica in range(plan.num_replicas):
        ranks = replica_ranks(plan, replica)
        assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
        assert [plan.stage_of(rank) for rank in ranks] == sorted((plan.stage_of(r) for r in ranks), reverse=True)


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
        plan_of(degrees, layout)  # Every rank is in one stage.
        assert 0 in layout[-1]
        for ranks, (data, tensor) in zip(layout, degrees, strict=True):
            for index in range(data):
                group = ranks[index * tensor : (index + 1) * tensor]
                assert group == tuple(range(group[0], group[0] + tensor))
                assert group[0] // per_node == group[-1] // per_node
    assert tried > 10


def test_what_fits_into_no_node_is_refused():
    with pytest.raises(PlanError, match="must be in one node; use degrees that divide each other and 3"):
        rank_layout([(3, 2)], 3)


def test_chains():
    assert longest_chain([2, 4, 8]) == (2, 4, 8)
    assert longest_chain([2, 3, 6]) == (3, 6)
    assert longest_chain([2, 3]) == (3,)
    assert longest_chain([]) == ()
