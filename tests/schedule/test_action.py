import pytest

from lightning_mist.errors import ScheduleError
from lightning_mist.schedule import Action, ActionKind

WHOLE = ["2F0", "0B13", "1RECV_F3", "1SEND_F3", "0RECV_B2", "11SEND_B2", "4REDUCE", "0REDUCE_TIED", "0STEP", "3GATHER"]
OF_UNITS = ["0F3:12", "0B3:head", "2REDUCE:tail", "1UNSHARD:0", "1RESHARD:tail"]


@pytest.mark.parametrize("text", [*WHOLE, *OF_UNITS])
def test_text_round_trips(text):
    assert str(Action.parse(text)) == text


def test_every_kind_has_a_text_that_parses_to_it():
    for kind in ActionKind:
        for microbatch, unit in ((None, None), (7, None), (None, 2), (7, 2)):
            try:
                action = Action(3, kind, microbatch, unit)
            except ScheduleError:
                continue
            assert Action.parse(str(action)) == action
            break
        else:
            pytest.fail(f"{kind} cannot be made")


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2f0", "2F0 2F1", "2F-1", "-1F0", "2F0:", "2F0:-1", "2F0:neck"])
def test_other_text_is_refused(text):
    with pytest.raises(ScheduleError, match="is not an action: write stage"):
        Action.parse(text)


def test_microbatch_belongs_to_the_kind():
    with pytest.raises(ScheduleError, match="2FNone: this kind needs microbatch"):
        Action(2, ActionKind.FORWARD)
    with pytest.raises(ScheduleError, match="2STEP1: this kind has no microbatch"):
        Action(2, ActionKind.OPTIMIZER_STEP, 1)


def test_unit_belongs_to_the_kind():
    with pytest.raises(ScheduleError, match="2UNSHARD with unit None: this kind needs a unit"):
        Action(2, ActionKind.UNSHARD)
    with pytest.raises(ScheduleError, match="2STEP with unit 1: this kind has no unit"):
        Action(2, ActionKind.OPTIMIZER_STEP, None, 1)
