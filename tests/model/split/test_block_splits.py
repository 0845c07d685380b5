import torch

from lightning_mist.model.split.block_splits import EXACT_ENTRIES, Checks, check_type, too_large
from lightning_mist.model.split.factored import MOST_BYTES
from lightning_mist.model.split.split_check import Outcome
from lightning_mist.plan.tensor_split import ParameterSplit

SPLITS = (ParameterSplit(name="weight", dim=0, factors=((8, True),)),)


def asked(checks, *questions):
    return [checks(SPLITS, degree, in_parts=in_parts).reason for degree, in_parts in questions]


def checks(reason=None, *, is_large):
    seen: list[tuple[int, bool]] = []

    def run(splits, degree, in_parts, adds_later):
        assert (splits, adds_later) == (SPLITS, False)
        seen.append((degree, in_parts))
        return Outcome(reason=reason)

    return Checks(run, (False, True), is_large=is_large), seen


def test_small_parts_are_checked_over_every_number_of_ranks():
    check, seen = checks(is_large=False)
    assert asked(check, (4, False), (2, False)) == [None, None]
    assert seen == [(4, False), (2, False)]


def test_large_parts_are_not_checked_again_over_fewer_ranks():
    check, seen = checks(is_large=True)
    asked(check, (4, False), (2, False), (3, False), (2, True), (8, False))
    assert seen == [(4, False), (3, False), (2, True), (8, False)]


def test_a_large_part_that_did_not_pass_is_checked_over_fewer_ranks():
    check, seen = checks("differs", is_large=True)
    assert asked(check, (4, False), (2, False)) == ["differs", "differs"]
    assert seen == [(4, False), (2, False)]


def test_large_parts_are_checked_in_smaller_numbers_and_the_largest_not_at_all():
    assert check_type(EXACT_ENTRIES) == torch.float64
    assert check_type(EXACT_ENTRIES + 1) == torch.float32
    most = MOST_BYTES // (4 * 4)
    assert too_large(most, torch.float32) is None
    assert "it could not be checked" in too_large(most + 1, torch.float32)
