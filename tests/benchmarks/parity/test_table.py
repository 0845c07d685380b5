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
    monkeypatch.setattr(table, "subject", lambda name, dtype, masters: (name, dtype))
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
    assert len(gradients.samples) == 6
    assert "Refused (bert under tp 2): no heads." in gradients.notes
    assert (gradients.theme, curves.theme) == ("parity", "parity-curves")
    assert [row["nano"] for row in curves.samples] == ["2.0e-11"] * 6
    # Tensor-parallel ranks round parts of sums, so that their masters are held to account in more bits.
    assert [(row["plan"], row["precision"]) for row in gradients.samples[4:]] == [
        ("dp 2, ZeRO 0", "bfloat16, float32 masters"),
        ("tp 2", "float32, float64 masters"),
    ]
    assert [(row["plan"], row["optimizer"]) for row in curves.samples] == [
        ("tp 2", "AdamW"),
        ("dp 2, ZeRO 0", "AdamW"),
        ("dp 2, ZeRO 0", "AdamW"),
        ("dp 2, ZeRO 0", "SGD"),
        ("tp 2", "AdamW"),
        ("tp 2", "SGD"),
    ]
    out = capsys.readouterr().out
    assert "[1/18, " in out
    assert "bert, tp 2: refused no heads" in out
    assert "18 cells, 0 differ" in out


@pytest.mark.parametrize(("left_out", "theme"), [("--models", "parity-curves"), ("--curve-models", "parity")])
def test_one_of_the_records_alone(monkeypatch, written, left_out, theme):
    assert run(monkeypatch, outcome_of, left_out) == 0
    assert [record.theme for record in written] == [theme]


def test_a_cell_that_differs_is_named_and_fails(monkeypatch, capsys, written):
    differing = Outcome(gradient=1.0, differing="gradient of w on rank 1: off by 1.0e+00")
    assert run(monkeypatch, lambda subject, layout: differing, "--models", "gpt2", "--no-record") == 1
    assert "gpt2, tp 2: differs gradient of w on rank 1" in capsys.readouterr().out
    assert written == []


def test_master_weights_are_tried_in_16_bits_where_one_process_rounds_the_same_sums():
    def tried(precision):
        return table.plans_in(
            precision, ["dp 2, ZeRO 2", "pp 4, GPipe", "pp 2 x dp 2", "tp 4", "zero bubble, pp 2, all offloaded"]
        )

    assert tried("bfloat16, float32 masters") == ["dp 2, ZeRO 2", "pp 4, GPipe", "zero bubble, pp 2, all offloaded"]
    assert tried("float32, float64 masters") == ["pp 2 x dp 2", "tp 4"]
    assert len(tried("float64")) == 5
    # Even pieces are clipped by a norm that adds up in another order.
    assert table.plans_in("bfloat16, float32 masters", ["dp 2, ZeRO 0", "dp 2, ZeRO 2"], "AdamW") == ["dp 2, ZeRO 0"]


def test_whole_parameters_are_dealt_out_to_an_optimizer_that_needs_them():
    plans = ["dp 2, ZeRO 1", "dp 2, ZeRO 1, whole parameters"]
    assert [table.plans_in("float64", plans, name) for name in ("AdamW", "Adafactor", "")] == [
        *([p] for p in plans),
        plans,
    ]
