from dataclasses import replace

from lightning_mist.explain.explain_text import memory_table, render_explanation
from lightning_mist.plan import Predicted, PredictedStage
from tests.explain.test_explain_text import explanation
from tests.tuner.plans import pipeline

GIB = 2**30


def with_terms(*peaks):
    stages = tuple(
        PredictedStage(
            steady_seconds=1.0,
            boundary_seconds=0.0,
            forward_seconds=0.5,
            backward_seconds=0.5,
            peak_bytes=8 * GIB,
            breakdown=(
                ("parameter_bytes", 8.0 * GIB - size),
                ("activation_bytes", float(size)),
                ("update_seconds", 5.0),
            ),
        )
        for size in peaks
    )
    made = pipeline(*({"layers": 2} for _ in peaks))
    return replace(made, predicted=Predicted(step_seconds=0.5, stages=stages))


def cells(table):
    return [str(column.header) for column in table.columns], [list(column.cells) for column in table.columns]


def test_rows_add_up_to_the_peak_and_small_terms_are_put_together():
    _, table = memory_table(with_terms(2 * GIB, 0))
    assert cells(table) == (
        ["stage", "parameters", "activations kept for backward", "others", "peak"],
        [["0", "1"], ["6.0 GiB", "8.0 GiB"], ["2.0 GiB", "-"], ["-", "-"], ["8.0 GiB", "8.0 GiB"]],
    )
    _, table = memory_table(with_terms(2**20))
    assert cells(table) == (["stage", "parameters", "others", "peak"], [["0"], ["8.0 GiB"], ["1.0 MiB"], ["8.0 GiB"]])


def test_sentences_are_wrapped_and_never_cut():
    made = replace(explanation(), plan=with_terms(GIB, GIB))
    text = render_explanation(made, width=40)
    lines = text.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert "bytes of the most loaded device at its" in text
    at = lines.index("what each technique buys")
    assert lines[at + 1 : at + 3] == ["- a (b): c. Without it the plan takes", "  600 ms per step (+20.0%)."]


def test_there_is_no_colour_unless_asked_for():
    made = replace(explanation(), plan=with_terms(GIB, GIB))
    assert "\x1b" not in render_explanation(made)
    assert "\x1b" in render_explanation(made, color=True)
