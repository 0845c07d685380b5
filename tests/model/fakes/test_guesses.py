import torch

from lightning_mist.model.child_process import BUDGET
from lightning_mist.model.fakes.origins import Guesses, describe_guesses, guess


def test_guesses_are_of_the_type_that_is_read() -> None:
    assert [guess(dtype) for dtype in (torch.bool, torch.float16, torch.int64)] == [False, 1.0, 1]
    assert [type(guess(dtype)) for dtype in (torch.bool, torch.float16, torch.int64)] == [bool, float, int]


def test_reading_many_numbers_is_no_loop_but_computing_between_reads_is() -> None:
    guesses = Guesses()
    for _ in range(20_000):
        assert not guesses.note(0)
    ((line, count),) = guesses.reads
    assert (line.rpartition("/")[2].partition(":")[0], count) == ("test_guesses.py", 20_000)
    endless = ""
    for operators in range(3_000):
        endless = guesses.note(operators)
    assert "3000 times" in endless
    assert len(guesses.reads) == 2


def test_a_loop_of_many_operators_is_known_sooner() -> None:
    guesses = Guesses()
    found = [guesses.note(100 * number) for number in range(500)]
    first = next(number for number, endless in enumerate(found) if endless)
    assert BUDGET.rounds <= first <= 2 * BUDGET.rounds
    assert f"{first + 1} times at {__file__}" in found[first]
    # A large network that reads a value in every layer is none.
    guesses = Guesses()
    assert not any(guesses.note(100 * number) for number in range(BUDGET.rounds - 1))


def test_reads_in_words() -> None:
    assert describe_guesses((("a.py:1", 2),)) == (
        "the step reads 2 values into Python at a.py:1; branches on them were taken as for False or 1"
    )
    many = tuple((f"a.py:{line}", 1) for line in range(5))
    assert "5 values into Python at a.py:0, a.py:1, a.py:2 and 2 other lines" in describe_guesses(many)
