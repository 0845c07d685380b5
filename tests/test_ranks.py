"""What runs the ranks of the integration tests."""

import os
import re

import pytest
import torch.distributed as dist

from tests.workers import launched


def rank_of_world(broken: int | None) -> list[int]:
    """Ranks that meet; with a broken one, the other waits for ever."""
    if os.environ["RANK"] == str(broken):
        raise ValueError("broken on purpose")
    if broken is not None:
        os.read(os.pipe()[0], 1)
    dist.init_process_group("gloo")
    values = [-1] * int(os.environ["WORLD_SIZE"])
    dist.all_gather_object(values, dist.get_rank())
    return [*values, dist.get_rank()]


def test_ranks_meet_and_give_what_they_have() -> None:
    assert launched(rank_of_world, None, world=3) == [[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 2, 2]]


def test_a_failing_rank_ends_all() -> None:
    with pytest.raises(AssertionError, match=re.compile("Traceback.*ValueError: broken on purpose", re.DOTALL)):
        launched(rank_of_world, 1)
