import numpy as np

from lightning_mist.model.events.event_tape import EventTape, Label, Slots

LABEL = Label("working_bytes", "temporary")


def test_events_of_slots_and_single_events_keep_their_order():
    tape = EventTape()
    first = tape.malloc(10, LABEL)
    slots = Slots(bytes_K=np.array([1, 2]), labels=(LABEL, LABEL))
    one, two = tape.reserve(slots, 0, 0), tape.reserve(slots, 0, 1)
    tape.play(np.array([1, 2, -1]), two)
    tape.free(first)
    tape.play(np.array([2]), one)
    tape.mark("0F1")
    assert (first, one, two) == (0, 1, 3)
    assert tape.events().tolist() == [1, 4, 5, -4, -1, 3]
    assert tape.bytes().tolist() == [10, 1, 2, 1, 2]
    assert tape.length == 6
    assert tape.marks[0].event == 6
    assert [(block.first, block.stage, block.microbatch) for block in tape.blocks] == [
        (0, -1, -1),
        (1, 0, 0),
        (3, 0, 1),
    ]


def test_events_can_be_played_in_pieces():
    events_E, whole, pieces = np.array([1, 2, -1, 3]), EventTape(), EventTape()
    slots = Slots(bytes_K=np.array([1, 2, 3]), labels=(LABEL,) * 3)
    for tape in (whole, pieces):
        assert tape.reserve(slots, 0, 0) == 0
    whole.play(events_E, 0)
    pieces.play(events_E[:2], 0)
    pieces.play(events_E[2:], 0)
    pieces.play(events_E[4:], 0)
    assert whole.events().tolist() == pieces.events().tolist()
    assert EventTape().events().tolist() == EventTape().bytes().tolist() == []
