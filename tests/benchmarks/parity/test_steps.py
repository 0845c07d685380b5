import pytest

from benchmarks.parity.steps import OF_ONE_STAGE, SHARED, STEPS, cell


def seen(value=1.0, error=""):
    return {"batches": [value]}, error


def test_the_largest_difference_of_any_rank():
    assert cell([seen(), seen(4.0)], [seen(), seen(4.0 + 4e-11)], 1e-10) == ("1.0e-11", "")


def test_what_differs_is_named():
    text, why = cell([({"epochs": {"acc": [1.0]}}, "")], [({"epochs": {"acc": [1.5]}}, "")], 1e-10)
    assert text == "differs"
    assert why == "off by 5.0e-01 at acc"


@pytest.mark.parametrize("found", [{}, {"batches": []}])
def test_what_a_rank_has_not_seen_differs(found):
    assert cell([seen()], [(found, "")], 1e-10)[0] == "differs"


def test_a_refusal_is_told_from_an_error():
    assert cell([seen()], [({}, "not\nallowed.")], 1e-10) == ("refused", "not allowed")
    assert cell([seen()], [seen(error="stopped")], 1e-10) == ("differs", "stopped")
    assert cell([seen()], [({}, "Traceback: broken")], 1e-10)[0] == "differs"


def test_manual_steps_are_tried_under_plans_of_one_stage_and_metrics_under_all():
    assert STEPS["metrics"][1].keys() == {*OF_ONE_STAGE, *SHARED}
    for name, layout in OF_ONE_STAGE.items():
        assert (layout.num_stages, layout.parts) == (1, 1), name
