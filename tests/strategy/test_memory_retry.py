"""Several processes do not turn around together: they end with what to ask for, and the next start plans with less."""

from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import InfeasibleError
from lightning_mist.strategy.memory_retry import TIGHTER, WATCHED_STEPS, FirstSteps
from lightning_mist.strategy.planning.decision import remember_limit, remembered_limit


def steps(folder, needs=1000):
    """The first steps of one of several ranks."""
    decision = SimpleNamespace(replan=None, reach=None, needs=needs, cache_place=folder / "plan.json")
    module = SimpleNamespace(_current_fx_name="optimizer_step")
    return FirstSteps(SimpleNamespace(_decision=decision, lightning_module=module, global_rank=1), decision)


def stepped(first, work):
    """An optimizer step with its batch."""
    for tried in first.tried_steps():
        with tried:
            result = batch(first, work)
    return result


def batch(first, work):
    for tried in first.tried_batches(None):
        with tried:
            result = work()
    return result


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_rank_that_runs_out_of_memory_says_what_to_ask_for_and_the_next_start_knows(tmp_path):
    first = steps(tmp_path)
    (tmp_path / "plan.json").write_text("a plan")
    with pytest.raises(InfeasibleError, match=rf"rank 1 ran out of memory .* memory_limit={int(TIGHTER * 1000)} "):
        stepped(first, out_of_memory)
    assert remembered_limit(tmp_path / "plan.json") == int(TIGHTER * 1000)
    assert not (tmp_path / "plan.json").exists()
    # Between steps, where gradients are only accumulated, as well; and programs that catch torch's error catch it.
    with pytest.raises(torch.OutOfMemoryError, match="as the next start does by itself"):
        batch(steps(tmp_path), out_of_memory)


def test_plans_of_the_users_and_later_steps_are_left_alone(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        stepped(steps(tmp_path, needs=None), out_of_memory)
    first = steps(tmp_path)
    for _ in range(WATCHED_STEPS):
        assert stepped(first, lambda: 1) == 1
    with pytest.raises(torch.OutOfMemoryError):
        stepped(first, out_of_memory)
    assert remembered_limit(tmp_path / "plan.json") is None


def test_a_limit_that_is_no_number_is_none(tmp_path):
    remember_limit(tmp_path / "a" / "plan.json", 7)
    assert remembered_limit(tmp_path / "a" / "plan.json") == 7
    for text in ("-7", "0", "seven", "\x00"):
        (tmp_path / "a" / "plan.limit").write_text(text)
        assert remembered_limit(tmp_path / "a" / "plan.json") is None
    (tmp_path / "a" / "plan.limit").write_text("much")
    assert remembered_limit(tmp_path / "a" / "plan.json") is None
