import re

import pytest

from benchmarks.reports.run import COLUMNS, LAYERS_OF, REPORTS, plans_of
from lightning_mist import Plan
from tests.traps.project import LAYERS


def test_there_are_enough_reports_and_no_two_alike():
    assert len(REPORTS) >= 25
    assert len({report.name for report in REPORTS}) == len(REPORTS)


def test_every_report_names_its_thread_and_its_title():
    for report in REPORTS:
        thread, _, title = report.name.partition(" ")
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread), thread
        assert title


@pytest.mark.parametrize("layers", sorted(set(LAYERS_OF.values())))
def test_there_is_a_plan_for_every_column(layers):
    plans = plans_of(layers)
    assert set(plans) == set(COLUMNS.values())
    for name, plan in plans.items():
        if isinstance(plan, Plan) and (layers or name != "pp2"):
            assert plan.stages[-1].layers[1] == layers
    assert LAYERS in LAYERS_OF.values()
