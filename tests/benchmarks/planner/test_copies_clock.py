"""Copies on the clock: small lists whose times can be counted by hand."""

import pytest

from benchmarks.planner.copies_clock import run_copies
from lightning_mist.schedule import Action


def times_of(text, *, seconds=1.0, nbytes=1.0, rates=(1.0, 1.0), batches=1):
    actions = [Action.parse(word) for word in text.split()]

    def one(action):
        return seconds.get(str(action), 0.0) if isinstance(seconds, dict) else seconds

    def copied(action, is_final):
        return nbytes.get(str(action), 0.0) if isinstance(nbytes, dict) else nbytes

    return run_copies([actions] * batches, one, copied, rates)


def spans(times):
    return [(str(copy.action), copy.start, copy.end) for copy in times.copies[-1]]


UPDATE = "0LOAD_O:0 0LOAD_O:1 0UPDATE:0 0STORE_O:0 0LOAD_O:2 0UPDATE:1 0STORE_O:1 0UPDATE:2 0STORE_O:2"


def test_a_room_is_filled_when_what_was_there_has_left():
    times = times_of(UPDATE, rates=(1.0, 0.5))
    assert spans(times) == [
        ("0LOAD_O:0", 0.0, 1.0),
        ("0LOAD_O:1", 1.0, 2.0),
        ("0STORE_O:0", 2.0, 4.0),
        ("0LOAD_O:2", 4.0, 5.0),
        ("0STORE_O:1", 4.0, 6.0),
        ("0STORE_O:2", 6.0, 8.0),
    ]
    assert times.computed == ((1.0, 2.0), (2.0, 3.0), (5.0, 6.0))
    # At the end of a batch all state is home.
    assert times.ends == (8.0,)
    assert times.hidden_bytes(0) == pytest.approx(1.0 + 0.5 + 0.5)


def test_activations_leave_beside_the_next_unit_and_come_back_ahead():
    text = (
        "0F0:0 0STORE_A0:0 0F0:1 0STORE_A0:1 0DROP_A0:0 0F0:tail 0DROP_A0:1 0LOAD_A0:1 0B0:tail 0LOAD_A0:0 0B0:1 0B0:0"
    )
    slow = spans(times_of(text, rates=(1.0, 0.5)))
    assert slow == [
        ("0STORE_A0:0", 1.0, 3.0),
        ("0STORE_A0:1", 3.0, 5.0),
        ("0LOAD_A0:1", 5.0, 6.0),
        ("0LOAD_A0:0", 6.0, 7.0),
    ]
    times = times_of(text)
    assert times.ends == (6.0,)
    assert times.hidden_bytes(0) == 4.0


def test_gradients_come_beside_the_backward_that_adds_to_them():
    text = "0LOAD_G:1 0B1:1 0STORE_G:1 0LOAD_G:0 0B1:0 0STORE_G:0"
    times = times_of(text, nbytes={"0LOAD_G:1": 3.0, "0STORE_G:1": 1.0, "0LOAD_G:0": 0.5, "0STORE_G:0": 1.0})
    assert spans(times) == [
        ("0LOAD_G:1", 0.0, 3.0),
        ("0STORE_G:1", 3.0, 4.0),
        ("0LOAD_G:0", 3.0, 3.5),
        ("0STORE_G:0", 4.0, 5.0),
    ]
    assert times.ends == (4.0,)
    assert times.hidden_bytes(0) == pytest.approx(1.0 + 1.0 + 0.5)


def test_what_was_fetched_for_the_update_is_not_fetched_again():
    text = "0LOAD_P:0 0UPDATE:0 0STORE_P:0 0UNSHARD:0 0F0:0 0RESHARD:0 0UNSHARD:0 0B0:0 0RESHARD:0"
    times = times_of(text, batches=2, rates=(1.0, 0.4))
    began = times.ends[0]
    assert [(word, start - began) for word, start, _ in spans(times)] == [
        ("0LOAD_P:0", 0.0),
        ("0STORE_P:0", 2.0),
        # The unit's memory is given back when it has been written to host memory: after 2.5 seconds.
        ("0UNSHARD:0", 4.5),
    ]


def test_ranks_give_out_what_has_arrived():
    seconds = {"0UNSHARD:0": 2.0, "0UNSHARD:1": 2.0, "0F0:0": 4.0, "0F0:1": 1.0}
    times = times_of("0UNSHARD:0 0UNSHARD:1 0F0:0 0F0:1", seconds=seconds)
    assert spans(times) == [("0UNSHARD:0", 0.0, 1.0), ("0UNSHARD:1", 1.0, 2.0)]
    assert times.computed == ((3.0, 7.0), (7.0, 8.0))


def test_a_sum_is_reduced_when_the_one_before_has_arrived():
    seconds = {"0B0:1": 1.0, "0B0:0": 1.0, "0REDUCE:1": 3.0, "0REDUCE:0": 1.0}
    times = times_of("0B0:1 0REDUCE:1 0B0:0 0REDUCE:0 0STORE_G:1 0STORE_G:0", seconds=seconds, nbytes=1.0)
    assert spans(times) == [("0STORE_G:1", 5.0, 6.0), ("0STORE_G:0", 6.0, 7.0)]


TWO_BACKWARDS = "0B0:0 0STORE_G:0 0LOAD_G:0 0B1:0 0STORE_G:0 0LOAD_G:0 0UPDATE:0"


def test_gradients_are_final_in_their_last_writing_back_and_for_the_update():
    asked = []
    actions = [Action.parse(word) for word in TWO_BACKWARDS.split()]

    def nbytes(action, is_final):
        asked.append((str(action), is_final))
        return 0.0

    run_copies([actions], lambda action: 0.0, nbytes, (1.0, 1.0))
    assert asked[-4:] == [("0STORE_G:0", False), ("0LOAD_G:0", False), ("0STORE_G:0", True), ("0LOAD_G:0", True)]
