from dataclasses import replace

from lightning_mist.cost import StageCostModel, predict, predict_with, seconds_with
from lightning_mist.cost.inputs import bounded_cache
from tests.cost.memory.test_memory_model import make_plan
from tests.specs import cluster, profile, spec

NETWORK = spec(6, tied=True, measured=True)
PLAN = make_plan([2, 4], degree=2, microbatches=4, rows=2, zero=1, checkpointed=1)


def test_answers_are_found_once():
    asked, answers = [], bounded_cache.BoundedCache()
    for _ in range(3):
        assert answers.of(PLAN, lambda plan: asked.append(plan) or "found") == "found"
    assert asked == [PLAN]


def test_answers_to_several_questions_are_found_together():
    asked, answers = [], bounded_cache.BoundedCache(most=3)

    def find(questions):
        asked.append(questions)
        return [-item for item in questions]

    assert answers.of_all([3, 1, 3], find) == [-3, -1, -3]
    assert answers.of_all([1, 2], find) == [-1, -2]
    assert answers.of_all([], find) == []
    assert asked == [[3, 1], [2]]
    # What is asked for together is answered even if it is more than what is kept; the last is kept.
    assert answers.of_all([1, 4, 5, 6], find) == [-1, -4, -5, -6]
    assert answers.of_all([6, 5, 4, 1], find) == [-6, -5, -4, -1]
    assert asked[2:] == [[4, 5, 6], [1]]


def test_what_was_asked_for_longest_ago_is_forgotten():
    answers = bounded_cache.BoundedCache(most=2)
    first, second, third = (replace(PLAN, schedule=name) for name in ("1f1b", "gpipe", "zb-h1"))
    for number, plan in enumerate((first, second, first, third)):
        answers.of(plan, lambda _, number=number: number)
    assert [answers.of(plan, lambda _: 9) for plan in (first, third, second)] == [0, 3, 9]


def test_what_a_model_remembers_is_what_a_new_one_finds():
    model = StageCostModel(NETWORK, profile(), cluster(PLAN.world_size))
    first = predict_with(model, PLAN)
    assert predict_with(model, replace(PLAN, predicted=first)) is first
    assert first == predict(NETWORK, profile(), cluster(PLAN.world_size), PLAN)


def test_the_seconds_of_a_plan_are_those_of_its_prediction():
    model = StageCostModel(NETWORK, profile(), cluster(PLAN.world_size))
    for name in ("1f1b", "gpipe", "zb-h1"):
        plan = replace(PLAN, schedule=name)
        assert seconds_with(model, plan) == predict_with(model, plan).step_seconds
