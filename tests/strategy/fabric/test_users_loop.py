"""What the code of a loop rules out, and arguments as batches."""

import importlib
import sys

import pytest
import torch

from lightning_mist.strategy.fabric.users_loop import Call, loop_exclusions
from lightning_mist.strategy.user_code import function_code, gradient_reads
from lightning_mist.tensors import batch_rows, slice_rows


def features(found):
    return {item.feature for item in found}


def clamp(model):
    for parameter in model.parameters():
        parameter.grad.clamp_(-1.0, 1.0)


class Runner:
    def __init__(self, is_clipping):
        self.is_clipping = is_clipping

    def fit(self):
        return self.inner()

    def inner(self):
        found = loop_exclusions()
        self.after() if self.is_clipping else None
        return found

    def after(self):
        torch.nn.utils.clip_grad_norm_([], 1.0)


class Quiet(Runner):
    def after(self):
        self.is_clipping = False


class Held:
    def __init__(self, runner):
        self.runner = runner

    @property
    def norms(self):
        return [parameter.grad.norm() for parameter in self.runner]


def test_code_that_is_running_is_read():
    def loop(model):
        found = loop_exclusions()
        if found is None:
            model.weight.grad = None
        return found

    (first, *_) = loop(None)
    assert "the loop may look at gradients (grad in " in first.reason
    assert "test_users_loop.py:" in first.reason
    assert {"sharded_gradients", "pipeline", "sharded_parameters"} <= features(loop(None))


def test_functions_that_it_calls_are_read():
    def loop():
        found = loop_exclusions()
        if found is None:
            clamp(found)
        return found

    assert "(grad in clamp, " in loop()[0].reason


def test_methods_of_the_object_that_runs_it_are_read():
    assert "(clip_grad_norm_ in after, " in Runner(False).fit()[0].reason


def test_methods_of_other_classes_are_not():
    assert Quiet(False).fit() == ()


def test_objects_that_it_has_are_read_where_it_names_something_of_them():
    def loop(holder):
        found = loop_exclusions()
        return found or holder.norms

    assert "(grad in norms, " in loop(Held([]))[0].reason


def test_fabrics_own_clipping_says_nothing():
    def loop(fabric, optimizer):
        found = loop_exclusions()
        if found is None:
            with torch.no_grad():
                fabric.clip_gradients(None, optimizer, max_norm=1.0)
            optimizer.zero_grad()
        return found

    assert loop(None, None) == ()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that counts as installed: one function clips, another asks a third, which does."""
    (tmp_path / "clipper").mkdir()
    (tmp_path / "clipper" / "__init__.py").write_text("from clipper import tools\n")
    code = "def clip(x):\n    return [p.grad for p in x]\n\ndef tidy(x):\n    return clip(x)\n"
    (tmp_path / "clipper" / "tools.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(function_code, "_LIBRARIES", (*function_code._LIBRARIES, str(tmp_path)))
    yield importlib.import_module("clipper")
    for name in ("clipper", "clipper.tools"):
        del sys.modules[name]


def test_what_the_loop_calls_of_installed_packages_is_read(installed):
    clip = installed.tools.clip

    def directly(model):
        found = loop_exclusions()
        return found or clip(model)

    def by_module(model, package):
        found = loop_exclusions()
        return found or package.tools.clip(model)

    for found in (directly([]), by_module([], installed)):
        assert "(grad in clip, " in found[0].reason


def test_what_those_call_in_turn_is_not(installed):
    tidy = installed.tools.tidy

    def loop(model):
        found = loop_exclusions()
        return found or tidy(model)

    assert loop([]) == []


def test_more_than_can_be_read_counts_as_found(monkeypatch):
    monkeypatch.setattr(gradient_reads, "_MOST_FUNCTIONS", 0)
    assert "too much to read" in loop_exclusions()[0].reason


class Descent(torch.optim.SGD):
    def step(self, closure=None):
        return [p.grad for group in self.param_groups for p in group["params"]]


def test_optimizers_may_look_at_gradients():
    def loop(optimizer):
        found = loop_exclusions()
        optimizer.step()
        return found

    assert loop(Descent([torch.ones(1, requires_grad=True)], lr=0.1)) == ()


def test_arguments_are_a_batch_of_rows():
    call = Call.of((torch.ones(2, 3), True), {"labels": torch.zeros(2), "names": ["a", "b"]})
    assert batch_rows(call) == 2
    part = slice_rows(call, 1, 2)
    assert part.to(lambda x, flag, labels, names: (x.shape, flag, labels.shape, names)) == ((1, 3), True, (1,), ["b"])


def test_two_arguments_without_rows_are_not_two_rows():
    call = Call.of(("causal", 3), {"x": torch.ones(2, 3)})
    assert slice_rows(call, 0, 1).to(lambda kind, width, x: (kind, width, len(x))) == ("causal", 3, 1)
