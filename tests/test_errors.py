import inspect

import pytest

from lightning_mist import errors


def test_every_error_is_a_mist_error_and_no_other_kind():
    classes = {name: item for name, item in vars(errors).items() if inspect.isclass(item)}
    assert sorted(classes) == [
        "CheckpointError",
        "InfeasibleError",
        "MistError",
        "PeerError",
        "PlanError",
        "ProfileError",
        "ScheduleError",
        "TraceError",
    ]
    for item in classes.values():
        assert item is errors.MistError or item.__bases__ == (errors.MistError,)
        assert not issubclass(item, (ValueError, TypeError, RuntimeError))
        assert item.__doc__


def test_a_message_is_kept_as_it_is():
    with pytest.raises(errors.MistError, match=r"^stages\[0\] = 3: a rule; a way out$"):
        raise errors.PlanError("stages[0] = 3: a rule; a way out")


def test_an_error_is_caught_where_another_would_be():
    class Pruned(Exception):
        def __init__(self, trial):
            super().__init__(trial)
            self.trial = trial

    said = errors.PeerError("rank 1 failed")
    for other in (Pruned(7), RuntimeError("x"), OSError(2, "no"), KeyError("k"), errors.PlanError("p"), said):
        found = errors.caught_as(other, said)
        assert isinstance(found, type(other))
        assert isinstance(found, errors.PeerError)
        assert str(found) == "rank 1 failed"
    assert errors.caught_as(Pruned(7), said).trial == 7
    assert errors.caught_as(KeyboardInterrupt(), said) is said
    assert errors.caught_as(None, said) is said
