from lightning_mist.schedule import generate
from lightning_mist.schedule.lowering import add_transfers, add_update
from tests.schedule.in_flight import held_counts, in_flight, in_flight_counts, waiting, waiting_counts
from tests.schedule.text import parse


def test_counts_over_a_list():
    lowered = add_update(add_transfers(generate(3, 4)), tied=False, gathers=[False] * 3)
    assert in_flight_counts(lowered[0]) == (1, 2, 3, 3, 3, 3, 2, 1)
    assert in_flight_counts(lowered[2]) == (1, 1, 1, 1, 1, 1, 1, 1)
    assert [in_flight(lowered, stage) for stage in range(3)] == [3, 2, 1]
    assert [waiting(lowered, stage) for stage in range(3)] == [0, 0, 0]


def test_what_waits_for_its_weights_is_counted_apart():
    lowered = add_transfers(parse("0F0 0I0 0F1 0I1 0W0 0W1"))
    assert in_flight_counts(lowered[0]) == (1, 1, 1, 1)
    assert waiting_counts(lowered[0]) == (2, 1)
    assert waiting(lowered, 0) == 2
    assert [(str(held.action), held.open, held.waiting) for held in held_counts(lowered[0])] == [
        ("0F0", ((0, 1),), ((0, 0),)),
        ("0I0", ((0, 1),), ((0, 0),)),
        ("0F1", ((0, 1),), ((0, 1),)),
        ("0I1", ((0, 1),), ((0, 1),)),
        ("0W0", ((0, 0),), ((0, 2),)),
        ("0W1", ((0, 0),), ((0, 1),)),
    ]


def test_chunks_are_counted_apart_and_together():
    (actions,) = parse("0F0 1F0 0F1 1B0 0B0")
    assert in_flight_counts(actions) == (1, 2, 3, 3, 2)
    assert [held.open for held in held_counts(actions)] == [
        ((0, 1), (1, 0)),
        ((0, 1), (1, 1)),
        ((0, 2), (1, 1)),
        ((0, 2), (1, 1)),
        ((0, 2), (1, 0)),
    ]
