from benchmarks.planner.honest_bytes import THEME, answer, need_of, questions
from benchmarks.planner.search_times import Case
from benchmarks.record import RECORDS, read_record


def test_default_forecasts_on_record_need_no_more_than_they_may():
    (path,) = RECORDS.glob(f"{THEME}_*.json")
    samples = read_record(path).samples
    assert len(samples) >= 18
    assert {sample["model"] for sample in samples if sample["precision"] == "masters"} >= {"gpt3-7b", "gpt3-13b"}
    for sample in samples:
        assert sample["of_limit"] <= 1.0, sample
    # So was it not.
    assert any(sample["before_of_limit"] > 1.05 for sample in samples if sample["by"] == "replay")


def test_a_default_forecast_is_replayed_against_its_limit():
    case = Case(model="gpt3-2.7b", cluster="1x4xL4", batch=64, length=2048, limit=2.0)
    spec, plan, seconds = answer((case, "masters"))
    need = need_of(spec, plan, case.cluster)
    assert need.by == "replay"
    assert 0.9 * need.limit < need.needed <= need.limit
    assert seconds > 0
    assert {precision for asked, precision in questions(["gpt3-2.7b"]) if asked == case} == {
        "masters",
        "bf16-true",
        "bf16-mixed",
    }
