from dataclasses import fields

from lightning_mist.cost.plan_clock import StageSpent


def test_terms_are_named_and_add_up():
    names = [field.name for field in fields(StageSpent)]
    spent = StageSpent(**{name: 2.0**power for power, name in enumerate(names)})
    assert spent.terms == tuple((name, 2.0**power) for power, name in enumerate(names))
    assert spent.step_seconds == 2 ** len(names) - 1
