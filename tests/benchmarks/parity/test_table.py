import pytest

from benchmarks.parity import table
from benchmarks.parity.cell import Outcome


@pytest.fixture
def written(monkeypatch):
    records = []
    monkeypatch.setattr(table, "write_record", records.append)
    return records


def run(monkeypatch, gradients, *arguments):
    monkeypatch.setattr(table, "attempt", lambda compare, subject, layout: gradients(subject, layout))
    monkeypatch.setattr(table, "subject", lambda name, dtype: (name, dtype))
    return table.main([*arguments, "--plans", "tp 2", "dp 2, ZeRO 0"])


def outcome_of(subject, layout):
    if subject[0] == "bert" and layout.groups[0].tp > 1:
        return Outcome(refused="no heads")
    return Outcome(loss=1e-12, gradient=2e-11)


def test_a_row_per_plan_and_precision_and_a_column_per_model(monkeypatch, capsys, written):
    assert run(monkeypatch, outcome_of, "--models", "gpt2", "bert", "--curve-models", "nano") == 0
    gradients, curves = written
    assert [(row["plan"], row["precision"]) for row in gradients.samples][:2] == [
        ("tp 2", "float64"),
        ("dp 2, ZeRO 0", "float64"),
    ]
    assert gradients.samples[0] == {"plan": "tp 2", "precision": "float64", "gpt2": "2.0e-11", "bert": "refused"}
    assert len(gradients.samples) == 4
    assert "Refused (bert under tp 2): no heads." in gradients.notes
    assert (gradients.theme, curves.theme) == ("parity", "parity-curves")
    assert [row["nano"] for row in curves.samples] == ["2.0e-11"] * 2
    out = capsys.readouterr().out
    assert "[1/10, " in out
    assert "bert, tp 2: refused no heads" in out
    assert "10 cells, 0 differ" in out


def test_a_cell_that_differs_is_named_and_fails(monkeypatch, capsys, written):
    differing = Outcome(gradient=1.0, differing="gradient of w on rank 1: off by 1.0e+00")
    assert run(monkeypatch, lambda subject, layout: differing, "--models", "gpt2", "--no-record") == 1
    assert "gpt2, tp 2: differs gradient of w on rank 1" in capsys.readouterr().out
    assert written == []
