from benchmarks.planner.search_times import Case
from benchmarks.planner.small_gains import compared
from lightning_mist.tuner.search import search_state


def test_a_question_is_asked_with_and_without_small_gains() -> None:
    case = Case(model="gpt3-1.3b", cluster="1x2xA100-40+1x2xL4", batch=16, length=2048, limit=10.0)
    usual = search_state.MANY
    found = compared(case, "masters", many=0)
    assert usual == search_state.MANY
    assert found["pipelines"] > 1
    assert 0.0 < found["batches_share"] < 0.01
    assert found["exact_gap"] < 1e-8 < found["gap"] <= 0.0101
    assert found["search_seconds"] > 0 < found["exact_search_seconds"]
    assert found["predicted_step_seconds"] <= 1.2 * found["exact_predicted_step_seconds"]
