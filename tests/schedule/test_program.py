from hypothesis import given
from hypothesis import strategies as st

from lightning_mist.schedule import generate
from lightning_mist.schedule.action import ActionKind
from lightning_mist.schedule.lowering import KINDS, PLACES, add_transfers, program_of, program_of_lists, slot_of
from tests.schedule.text import parse

shapes = st.one_of(
    st.tuples(st.sampled_from(["1f1b", "gpipe", "zb-h1"]), st.integers(1, 6), st.just(1), st.integers(1, 9)),
    st.tuples(st.just("interleaved-1f1b"), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3)),
)


def sizes(shape):
    """Name, stages, microbatches and groups."""
    name, groups, chunks, count = shape
    return name, groups * chunks, count * groups if chunks > 1 else count, groups


@given(shapes)
def test_a_schedule_by_name_is_the_program_of_its_lowered_lists(shape):
    name, stages, microbatches, groups = sizes(shape)
    lists = add_transfers(generate(stages, microbatches, name, num_groups=groups))
    named, listed = program_of(stages, microbatches, name, num_groups=groups), program_of_lists(lists)
    assert (named.num_stages, named.links, named.senders) == (listed.num_stages, listed.links, listed.senders)
    assert stages == 1 or (named.has_transfers and listed.has_transfers)
    # Receives that are posted at the same place come in any order.
    for mine, others in zip(named.lines, listed.lines, strict=True):
        assert [(*step[:3], sorted(step[3])) for step in mine] == [(*step[:3], sorted(step[3])) for step in others]
    assert [sorted(posts) for posts in named.first] == [sorted(posts) for posts in listed.first]


def test_two_stages_by_hand():
    program = program_of_lists(
        parse(
            """
            0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1
            1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
            """
        )
    )
    assert program.links == ((0, 0), (1, 1))
    assert program.senders == (0, 1)
    assert program.first == ((), (0,))
    slots = [slot_of(0, ActionKind.FORWARD, is_first=index == 0, is_again=index == 1) for index in (0, 1)]
    assert program.lines[0][:2] == ((slots[0], -1, 0, (1, 2)), (slots[1], -1, 0, (1,)))
    assert [step[1:] for step in program.lines[1]] == [(0, 0, (0,)), (-1, 0, (3,)), (0, 1, ()), (-1, 0, (3,))]


def test_slots_are_all_different_and_dense():
    slots = [
        slot_of(stage, kind, is_first=is_first, is_again=is_again)
        for stage in range(3)
        for kind in KINDS
        for is_again in (False, True)
        for is_first in (False, True)
    ]
    assert sorted(slots) == list(range(3 * len(KINDS) * PLACES))


def test_computations_alone_move_nothing():
    assert not program_of_lists(generate(3, 2)).has_transfers
