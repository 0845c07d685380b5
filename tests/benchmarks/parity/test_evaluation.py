import math

import pytest

from benchmarks.parity.evaluated import LOADERS, WAYS
from benchmarks.parity.evaluation import Table, distance

OF = {"network": "n", "precision": "float64"}


def seen(value=1.0, whole=None):
    found = {(loader, way, "after a fit"): [["on_test_start"], value] for loader in LOADERS for way in WAYS}
    return found | {("even", "whole", "in a fit"): whole}, ""


@pytest.mark.parametrize(
    ("wanted", "found", "apart"),
    [
        ({"a": [1.0, 4.0]}, {"a": [1.0, 4.4]}, 0.1),
        ([0.5], [0.25], 0.25),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0),
        ([1.0], [math.nan], math.inf),
        (["on_test_start"], ["on_test_end"], math.inf),
        ([True], [False], math.inf),
        ([1.0, 2.0], [1.0], math.inf),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
    ],
)
def test_the_largest_difference_of_nestings(wanted, found, apart):
    assert distance(wanted, found)[0] == pytest.approx(apart)


def test_a_row_per_loader_with_the_largest_difference_of_any_rank():
    table = Table()
    table.add("tp 2", OF, [seen(), seen()], [seen(1.0 + 1e-12), seen(1.0 + 1e-11)], 1e-10)
    assert [row["loaders"] for row in table.rows] == list(LOADERS)
    assert table.rows[0]["test"] == "1.0e-11"
    assert table.differing == []


def test_what_differs_is_named():
    table = Table()
    table.add("tp 2", OF, [seen()], [seen(1.5)], 1e-10)
    assert {row[way] for row in table.rows for way in WAYS} == {"differs"}
    assert len(table.differing) == len(LOADERS) * len(WAYS)


def test_the_whole_module_is_a_difference_too():
    table = Table()
    table.add("tp 2", OF, [seen()], [seen(whole="a hook reads it")], 1e-10)
    assert table.differing == [f"tp 2, {OF}, even, in a fit: on the whole module: a hook reads it"]


def test_a_refusal_is_no_difference_but_an_error_is():
    table = Table()
    table.add("tp 2", OF, [seen()], [({}, "batch norm.")], 1e-10)
    assert table.rows == [{"plan": "tp 2", **OF, "loaders": "all", **dict.fromkeys(WAYS, "refused")}]
    assert table.reasons == {"batch norm": ["tp 2, n"]}
    table.add("tp 2", OF, [seen()], [({}, "Traceback: broken")], 1e-10)
    assert any("Traceback" in line for line in table.differing)
