"""The collector of cyclic garbage rests where it is told to, and works again behind it."""

import gc
from collections.abc import Iterator

import pytest

from lightning_mist.attributes import collector_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_the_collector_rests_inside_and_works_behind() -> None:
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_works_again_behind_an_error() -> None:
    gc.enable()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_a_decorated_function_may_be_called_again() -> None:
    @collector_paused()
    def enabled() -> bool:
        return gc.isenabled()

    gc.enable()
    assert [enabled(), gc.isenabled(), enabled(), gc.isenabled()] == [False, True, False, True]
