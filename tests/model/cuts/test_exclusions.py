import re

import pytest

from lightning_mist.model.cuts.blocks import find_blocks
from lightning_mist.model.cuts.exclusions import find_exclusions, structure_problems
from lightning_mist.model.cuts.fake_runs import run_twice
from lightning_mist.model.cuts.recorder import Record
from lightning_mist.tensors import slice_rows
from tests import zoo

A, B, C = "blocks.0", "blocks.1", "blocks.2"


def problems(*records, candidates=(A, B, C)):
    return structure_problems(records, candidates)


def test_blocks_that_run_once_each_in_one_order_are_no_problem():
    assert problems(Record(order=[A, B, C]), Record(order=[A, B, C])) == ()
    assert problems(Record(order=[C, A, B]), Record(order=[C, A, B])) == ()


def test_a_container_that_does_not_run_is_no_problem():
    assert problems(Record(order=[A, B]), Record(order=[A, B]), candidates=(A, B, "spare.0", "spare.1")) == ()


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"repeated": {B: "net.py:3"}}, {}, r"block blocks\.1 is called more than once .* \(again from net\.py:3\)"),
        ({}, {"order": [A, B], "nested": {C: A}}, r"block blocks\.2 runs inside block blocks\.0"),
        ({}, {"order": [A, B]}, r"block blocks\.2 is not called in every run"),
        ({}, {"order": [A]}, r"block blocks\.1 and 1 other are not called in every run"),
        ({"order": []}, {}, r"block blocks\.0 and 2 others are not called in every run"),
        ({}, {"order": [A, C, B]}, "the blocks run in another order from step to step"),
    ],
)
def test_what_stands_against_stages(first, second, reason):
    (found,) = problems(*(Record(**{"order": [A, B, C], **record}) for record in (first, second)))
    assert re.match(reason, found)


def test_one_problem_in_both_runs_is_said_once():
    record = Record(order=[A, B, C], repeated={A: "net.py:3"})
    assert len(problems(record, record)) == 1


def exclusions(name):
    module, make_batch = zoo.make(name)
    batch = make_batch(4)
    blocks = find_blocks(module, None)
    runs = run_twice(module, zoo.step(module), (batch, slice_rows(batch, 0, 3)), blocks)
    return find_exclusions(module, runs, frozenset(runs.records[0].order))


def test_a_plain_module_excludes_nothing():
    assert exclusions("plain") == ()


@pytest.mark.parametrize(
    ("name", "reason", "features"),
    [
        ("counter", "changes the attribute seen of the module", {"pipeline", "microbatches", "tensor"}),
        ("batch_norm", "changes buffer .* of a BatchNorm2d", {"pipeline", "microbatches", "checkpointing", "tensor"}),
        ("closure", "reads a tensor that is not one of its arguments", {"checkpointing"}),
        ("batch_write", "writes into the tensors of its batch", {"pipeline"}),
        (
            "parameter_write",
            "writes into parameter",
            {"pipeline", "microbatches", "checkpointing", "tensor", "context", "shards", "sharded_parameters"},
        ),
        ("metric", "updates the metric", {"pipeline", "tensor"}),
        ("random_drop", "draws from Python's random", {"pipeline", "tensor"}),
        ("stray", "through a reference outside its module", {"pipeline", "tensor", "shards"}),
    ],
)
def test_a_hazard_excludes_the_features_that_it_would_break(name, reason, features):
    assert {item.feature for item in exclusions(name) if re.search(reason, item.reason)} == features


def test_a_reason_is_said_once_for_each_feature():
    found = [(item.feature, item.reason) for item in exclusions("batch_norm")]
    assert len(found) == len(set(found))
