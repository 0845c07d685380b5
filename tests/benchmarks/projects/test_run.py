import importlib.util
import math

import pytest
import torch

from benchmarks.projects.run import PROJECTS, Training, difference, row_of

NAME = next(iter(PROJECTS))


def rank(**values):
    return {"values": values, "seconds": 2.0, "plan": "plain"}


def training(*ranks):
    return Training(ranks=ranks, lines=3, printed="")


@pytest.mark.parametrize("project", [project for project, _ in PROJECTS.values()])
def test_each_project_is_a_function_of_a_module_that_is_there(project):
    module, _, function = project.partition(".")
    spec = importlib.util.find_spec(f"benchmarks.projects.{module}")
    assert f"def {function}(strategy: str)" in spec.loader.get_source(spec.name)


@pytest.mark.parametrize(
    ("one", "other", "worst", "where"),
    [
        ({"a": 1.0}, {"a": 1.0}, 0.0, ""),
        ({"a": math.nan}, {"a": math.nan}, 0.0, ""),
        ({"a": torch.tensor([4.0, 2.0])}, {"a": torch.tensor([4.0, 1.0])}, 0.25, "a"),
        ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0}, 0.5, "b"),
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, math.inf, "a: (3,) in place of (2,)"),
        ({"a": 1.0}, {"b": 1.0}, math.inf, "['a', 'b'] not in both"),
        ({"a": 1.0}, {"a": math.nan}, math.inf, "a"),
    ],
)
def test_the_largest_difference_is_found(one, other, worst, where):
    assert difference(one, other) == (worst, where)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ((rank(a=1.0), rank(a=2.0)), "to the bit"),
        ((rank(a=1.0), rank(a=2.0 + 1e-6)), "same"),
        ((rank(a=1.0), rank(a=2.1)), "other: a"),
        ((rank(a=1.0), rank(a=math.nan)), "other: a"),
        ((), "does not train"),
    ],
)
def test_a_row_says_what_became_of_every_rank(found, word):
    assert row_of(NAME, training(rank(a=1.0), rank(a=2.0)), training(*found))["like DDP"] == word


def test_what_ddp_cannot_train_is_said():
    assert row_of(NAME, training(), training())["like DDP"] == "DDP itself fails"
