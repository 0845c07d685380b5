import dataclasses

import pytest

from lightning_mist.tuner.simpler import ALIKE, shapes, simplest, simplicity, techniques, why_simpler
from tests.tuner.plans import pipeline

PLAIN = pipeline({"layers": 4, "data": 2}, {"layers": 4, "data": 2})


def both(**changes):
    """A plan of two stages that differ from the plain ones."""
    return pipeline(*[{"layers": 4, "data": 2, **changes}] * 2)


@pytest.mark.parametrize(
    ("plan", "used"),
    [
        (PLAIN, ()),
        (both(zero=1), ("sharded optimizer state",)),
        (both(zero=3), ("sharded optimizer state", "sharded gradients", "sharded parameters")),
        (both(data=1, zero=2), ()),
        (both(checkpointed=1), ("recomputation",)),
        (both(tensor=2), ("tensor parallelism",)),
        (both(tensor=2, sequence=True), ("tensor parallelism", "sequence parallelism")),
        (both(offload={"optimizer": 0.5}), ("optimizer state in host memory",)),
        (dataclasses.replace(PLAIN, schedule="gpipe"), ()),
        (dataclasses.replace(PLAIN, schedule="zb-h1"), ("zb-h1",)),
        (pipeline({"layers": 8, "data": 2}, schedule="zb-h1"), ()),
    ],
)
def test_techniques_are_what_a_plan_does_beyond_computing_once(plan, used):
    assert techniques(plan) == used


def test_stages_have_one_shape_wherever_they_are():
    assert shapes(PLAIN) == 1
    assert shapes(pipeline({"layers": 4, "data": 2}, {"layers": 4, "data": 2, "checkpointed": 1})) == 2
    assert shapes(pipeline({"layers": 3}, {"layers": 5}, {"layers": 3})) == 2


def test_fewer_techniques_count_before_fewer_shapes_and_these_before_fewer_stages():
    one = pipeline({"layers": 8, "data": 4, "checkpointed": 1})
    uneven = pipeline({"layers": 5, "data": 2}, {"layers": 3, "data": 2})
    four = pipeline(*[{"layers": 2}] * 4)
    assert sorted([one, uneven, four, PLAIN], key=simplicity) == [PLAIN, four, uneven, one]
    assert why_simpler(PLAIN, one) == "it does without recomputation"
    assert why_simpler(PLAIN, both(zero=2)) == "it does without sharded optimizer state and sharded gradients"
    assert why_simpler(four, uneven) == "it has 1 kind of stages in place of 2"
    assert why_simpler(PLAIN, four) == "it has 2 stages in place of 4"


def test_only_plans_that_cannot_be_told_apart_are_weighed():
    fast, near = both(checkpointed=1), PLAIN
    assert simplest([(fast, 1.0), (near, 1 + 0.9 * ALIKE)]) is near
    assert simplest([(fast, 1.0), (near, 1 + 1.1 * ALIKE)]) is fast
    # Of equally simple ones it is the fastest, in whatever order they come.
    other = both(zero=1)
    assert simplest([(other, 1 + 0.5 * ALIKE), (fast, 1.0)]) is fast
    assert simplest([(fast, 1.0), (other, 1 + 0.5 * ALIKE)]) is fast
