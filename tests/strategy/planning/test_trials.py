"""Trying the user's code leaves nothing behind."""

import itertools
import re
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_mist.errors import PlanError, TraceError
from lightning_mist.model.child_process import BUDGET
from lightning_mist.strategy.planning import trial_step
from lightning_mist.strategy.planning.trial_step import TriedStep, tried

HOST = torch.device("cpu")


class Counted:
    calls = 0


def test_counters_iterators_and_arrays_are_as_before():
    numbers, kept, tensor = itertools.count(), [], torch.zeros(2)

    def work():
        Counted.calls += 1
        kept.append(1)
        tensor.add_(1)
        return Counted.calls, next(numbers), len(kept), float(tensor.sum())

    assert tried(work, HOST) == (1, 0, 1, 2.0)
    assert (Counted.calls, next(numbers), kept, float(tensor.sum())) == (0, 0, [], 0.0)


def test_nothing_is_written_or_printed(tmp_path, capfd):
    path = tmp_path / "lines"
    with path.open("w") as file:
        file.write("before\n")
        file.flush()

        def work():
            print("out")
            sys.stderr.write("err\n")
            file.write("through the open file\n")
            file.flush()
            with path.open("a") as again:
                again.write("through another\n")
            (tmp_path / "new").write_text("new")
            return path.read_text()

        assert tried(work, HOST) == "before\n"
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")


def test_errors_of_ours_are_as_they_were_and_others_say_what_failed():
    def refuse():
        raise PlanError("so")

    def fail():
        raise KeyError("missing")

    with pytest.raises(PlanError, match="so"):
        tried(refuse, HOST)
    with pytest.raises(TraceError, match=r"trying it before training failed: KeyError: 'missing'") as caught:
        tried(fail, HOST)
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_ends_the_process_ends_the_copy_only():
    import os

    with pytest.raises(TraceError, match="ended its process with status 3"):
        tried(lambda: os._exit(3), HOST)


def test_progress_arrives_from_a_copy():
    heard = []

    def work(tell=None):
        tell("timing the layers", 0.5)
        return 1

    assert tried(work, HOST, tell=lambda *said: heard.append(said)) == 1
    assert heard == [("timing the layers", 0.5)]


class Spins:
    """Never ends."""

    def __init__(self):
        self.data = torch.ones(100)

    def __call__(self):
        while True:
            self.data.add_(1.0)


@pytest.mark.parametrize("is_apart", [True, False])
def test_what_does_not_end_is_given_up_in_a_line_without_data(is_apart, monkeypatch):
    monkeypatch.setattr(BUDGET, "most_seconds", 0.3)
    monkeypatch.setattr(trial_step, "leaves_no_trace", lambda device: is_apart)
    before = threading.active_count()  # libraries may have some
    with pytest.raises(TraceError) as caught:
        tried(partial(Spins()), HOST)
    assert re.fullmatch(rf"a trial before training did not end at {__file__}:\d+ within .* given up", str(caught.value))
    assert threading.active_count() == before


class Stepping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(batch["x"]).sum() * batch["scale"]


def explained(batch, work, *, before=None):
    module = Stepping()
    step = TriedStep(SimpleNamespace(callbacks=[], datamodule=None), module, module.training_step)
    step.batch, step.before = batch, before
    with pytest.raises(TraceError) as caught:
        tried(step.around(partial(work, step)), HOST, clock=step.clock)
    return str(caught.value)


def test_that_ddp_shows_an_error_is_said_of_steps_that_fail_by_themselves():
    whole = {"x": torch.ones(4, 2), "scale": 0.5}
    shows = "strategy='ddp' shows the error"
    assert shows in explained({"x": torch.ones(4, 2)}, lambda step: step(step.batch))
    for part in ({"x": torch.ones(4, 2)}, {"x": torch.ones(4, 3), "scale": 0.5}, None):
        text = explained(whole, lambda step, part=part: step(part))
        assert shows not in text
        assert "The step itself runs on the first batch" in text


def test_steps_that_differentiate_by_themselves_are_refused_for_that():
    def work(step):
        step._saw_backward()
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph")

    text = explained({"x": torch.ones(4, 2), "scale": 0.5}, work)
    assert text.startswith("the step runs a backward of its own")
    assert "graph" not in text


def test_what_comes_before_a_step_is_done_in_the_copy_only():
    batch = {"x": torch.ones(4, 2)}

    def work(step):
        assert batch["scale"] == 0.5
        raise ValueError(float(step(batch).detach()) != 0)

    assert "ValueError: True" in explained(batch, work, before=lambda: batch.update(scale=0.5))
    assert "KeyError: 'scale'" in explained(batch, lambda step: step(batch), before=lambda: batch["y"])
    assert "scale" not in batch
