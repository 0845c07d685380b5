import json
import math
import pickle

import pytest
import torch

from benchmarks.uses import run
from benchmarks.uses.run import COLUMNS, USES, Cell, Result, Work, judged, rows_of
from benchmarks.uses.session import Uses, difference, plain
from tests.workers import apart

FEW = Uses("theme")


@FEW("same")
def same(session):
    session.keep("rank", [session.rank])


@FEW("wrong")
def wrong(session):
    session.keep("losses", [1.0 if session.plan is None else 1.1])


@FEW("crash")
def crash(session):
    if session.plan is not None:
        raise KeyError("something")


SAME, WRONG, CRASH = FEW.every


def result(*found, is_late=False):
    return Result(found=found, is_late=is_late, printed="")


def seen(**values):
    return {"seen": values}


def error(text, *, is_ours=False, has_begun=False):
    return {"error": text, "is_ours": is_ours, "has_begun": has_begun, "traceback": f"Traceback {text}"}


def test_there_are_enough_uses_and_no_two_alike():
    assert len(USES) >= 80
    assert len({use.key for use in USES}) == len(USES)


@pytest.mark.parametrize(
    ("ddp", "found", "kind", "text"),
    [
        ([seen(a=[1.0])] * 2, result(seen(a=[1.0]), seen(a=[1.0])), "same", ""),
        ([seen(a=[1.0])] * 2, result(seen(a=[1.0]), seen(a=[1.1])), "wrong", "rank 1: a: 1.1 in place of 1"),
        (
            [seen()] * 2,
            result(error("PlanError", is_ours=True), error("PlanError", is_ours=True)),
            "refused",
            "PlanError",
        ),
        ([seen()] * 2, result(error("E", is_ours=True, has_begun=True), None), "stopped", "E"),
        ([seen()] * 2, result(error("KeyError"), error("KeyError")), "crash", "Traceback KeyError"),
        ([seen()] * 2, result(None, None), "crash", ""),
        ([seen()] * 2, result(seen(), None, is_late=True), "hang", ""),
        ([error("ValueError")] * 2, result(error("ValueError"), None), "same", "the same error: ValueError"),
        ([error("V")] * 2, result(error("connection closed"), error("V")), "same", "the same error: V"),
        ([error("ValueError")] * 2, result(seen(), seen()), "wrong", "trained, but DDP does not: ValueError"),
        ([error("E")] * 2, result(error("P", is_ours=True), None), "same", "no training either: P"),
    ],
)
def test_cells_are_judged(ddp, found, kind, text):
    assert judged(SAME, ddp, found) == Cell(kind=kind, text=text)


def cells_of_few(folder):
    Work(folder, again=False, patience_seconds=60).cells([SAME, CRASH, WRONG], ["pp2"])


@pytest.mark.thorough
def test_uses_run_in_pairs_and_go_on_after_one_that_fails(tmp_path):
    apart(cells_of_few, tmp_path / "work", printed=tmp_path / "printed")
    assert [line.partition(" (")[0] for line in (tmp_path / "printed").read_text().splitlines()] == [
        "theme: same, pp2: same",
        "theme: crash, pp2: crash",
        "theme: wrong, pp2: wrong",
    ]


def test_what_is_done_is_not_done_again(tmp_path, monkeypatch):
    (tmp_path / "cells.json").write_text(json.dumps({f"{SAME.key}, pp2": ["refused", "why"]}))
    (tmp_path / "ddp.pickle").write_bytes(pickle.dumps({SAME.key: (None, None)}))
    monkeypatch.setattr(run, "_forked", None)
    cells = Work(tmp_path, again=False, patience_seconds=60).cells([SAME], ["pp2"])
    assert cells == {(SAME.key, "pp2"): Cell(kind="refused", text="why")}


def test_the_table_names_reasons_once():
    plans = list(COLUMNS.values())
    found = {(use.key, plan): Cell(kind="refused", text="no\n stages.") for use in (SAME, WRONG) for plan in plans[1:]}
    found |= {(SAME.key, plans[0]): Cell(kind="same"), (WRONG.key, plans[0]): Cell(kind="same", text="the same error")}
    rows, reasons = rows_of([SAME, WRONG], found)
    assert [row["plain"] for row in rows] == ["same", "same error"]
    assert rows[0]["tp 2"] == "refused (1)"
    assert reasons == "(1) no stages."


@pytest.mark.parametrize(
    ("wanted", "found", "text"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0 + 1e-12]}, ""),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}, "a: 2.1 in place of 2"),
        ({"a": [1.0]}, {"b": [1.0]}, ": ['a', 'b'] are not in both"),
        ([1.0], [1.0, 2.0], ": 2 in place of 1"),
        ([math.nan], [math.nan], ""),
        ([math.nan], [0.0], ": 0 in place of nan"),
        ([None, "x"], [None, "y"], "1: y in place of x"),
        (True, None, ": None in place of True"),
    ],
)
def test_the_first_difference_is_named(wanted, found, text):
    assert difference(wanted, found, 1e-9) == text


def test_tensors_and_paths_become_numbers_and_texts(tmp_path):
    value = {"a": torch.ones(2), "b": (tmp_path / "x", None, object())}
    assert plain(value, str(tmp_path)) == {
        "a": {"dtype": "torch.float32", "values": [1.0, 1.0]},
        "b": ["/x", None, "object"],
    }
