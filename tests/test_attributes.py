"""Attributes that have other values for a while."""

import threading
from types import MethodType

import pytest

from lightning_mist.attributes import replaced, unwrapped, wrapped


class _Here(threading.local):
    depth = 0


def test_attributes_are_as_before_behind_it_even_after_an_error():
    here = _Here()

    def fail() -> None:
        with replaced(here, depth=1), replaced(here, depth=2):
            assert here.depth == 2
            raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fail()
    assert here.depth == 0


def test_functions_that_say_to_be_inside_each_other_come_to_an_end():
    def function(self):
        pass

    function.__wrapped__ = MethodType(function, object())
    assert list(wrapped(function)) == [function]
    assert unwrapped(function) is function
