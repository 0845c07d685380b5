from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import arrived_sends, generate, lower
from lightning_mist.schedule.action import SENDS
from lightning_mist.schedule.lowering import add_transfers
from tests.plans import plans
from tests.schedule.text import parse


def text(found):
    return {str(action): [str(send) for send in sends] for action, sends in found.items()}


def test_1f1b_tells_of_activations_at_their_gradients_and_of_gradients_at_later_activations():
    found = arrived_sends(add_transfers(generate(3, 4)))
    assert text(found[0]) == {"0B0": ["0SEND_F0", "0SEND_F1"], "0B1": ["0SEND_F2"], "0B2": ["0SEND_F3"]}
    assert text(found[1])["1F3"] == ["1SEND_B0"]
    assert text(found[2]) == {"2F2": ["2SEND_B0"], "2F3": ["2SEND_B1"]}


def test_gpipe_tells_of_no_gradient():
    found = arrived_sends(add_transfers(generate(2, 3, "gpipe")))
    assert text(found[0]) == {"0B0": ["0SEND_F0", "0SEND_F1", "0SEND_F2"]}
    assert found[1] == {}


def test_what_is_answered_before_it_is_consumed_has_not_arrived():
    schedule = parse(
        """
0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""
    )
    assert text(arrived_sends(schedule)[0]) == {"0B0": ["0SEND_F0"], "0B1": ["0SEND_F1"]}


@given(plans(max_devices=6), st.booleans())
def test_a_send_arrives_at_most_once_and_after_it_was_sent(plan, tied):
    for actions, found in zip(lowered := lower(plan, tied=tied), arrived_sends(lowered), strict=True):
        position = {action: index for index, action in enumerate(actions)}
        sends = [send for arrived in found.values() for send in arrived]
        assert len(sends) == len(set(sends))
        assert set(sends) <= {action for action in actions if action.kind in SENDS}
        assert all(position[send] < position[action] for action, arrived in found.items() for send in arrived)
