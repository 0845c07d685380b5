from contextlib import contextmanager

from lightning_mist.runtime.shared_patch import SharedPatch


def test_the_first_makes_the_change_and_the_last_undoes_it_in_any_order():
    log = []

    @contextmanager
    def change():
        log.append("made")
        yield
        log.append("undone")

    patch = SharedPatch(change)
    first, second = patch, patch
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert log == ["made"]
    second.__exit__(None, None, None)
    assert log == ["made", "undone"]
    with patch, patch:
        pass
    assert log == ["made", "undone"] * 2
