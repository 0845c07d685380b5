import json
import random

import pytest

from benchmarks.faults.bad_plan_cases import documents, plan_texts
from benchmarks.faults.bad_runs import WAY_OUT
from lightning_mist.errors import PlanError
from lightning_mist.plan import load
from lightning_mist.plan.codec import from_json, to_json


def test_spoilt_plan_files_are_refused_with_a_way_out_or_are_plans(tmp_path):
    """Some of those that ``benchmarks.faults.bad_runs`` gives to runs; a value may be replaced by another good one."""
    path, said, found = tmp_path / "plan.json", [], []
    for _, text in plan_texts(random.Random(1), 30):
        path.write_text(text)
        try:
            found.append(load(path))
        except PlanError as error:
            said.append(str(error))
    assert all(from_json(to_json(plan)) == plan for plan in found)
    start = f"plan file '{path}': "
    assert [text for text in said if not text.startswith(start) or not WAY_OUT.search(text.removeprefix(start))] == []
    assert len(said) > 100
    assert len(found) > 10


@pytest.mark.parametrize("document", documents().values(), ids=documents())
def test_what_they_are_made_of_is_good(document):
    plan = from_json(json.dumps(document))
    assert from_json(to_json(plan)) == plan
