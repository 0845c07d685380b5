from dataclasses import fields

from lightning_mist.cli.plan_command import SearchOptions
from lightning_mist.tuner import SearchSpace


def test_every_limit_of_a_search_is_an_option_with_its_default():
    options = {field.name: field.default for field in fields(SearchOptions)}
    assert options == {field.name: field.default for field in fields(SearchSpace)}
    assert SearchOptions().space() == SearchSpace()


def test_lists_become_tuples():
    assert SearchOptions(zero_stages=[1, 2], offload=[]).space() == SearchSpace(zero_stages=(1, 2), offload=())
