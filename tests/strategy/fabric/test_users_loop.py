"""What the code of a loop rules out, and arguments as batches."""

import importlib
import sys
from collections import OrderedDict

import pytest
import torch
from torch.utils._pytree import tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.model.user_code import reach
from lightning_mist.strategy.fabric.users_loop import (
    Arrival,
    Call,
    OutsideLoss,
    as_step_result,
    connected,
    form_of,
    from_step_result,
    loop_exclusions,
    stand_in_loss,
)
from lightning_mist.strategy.user_code import hook_analysis
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
    monkeypatch.setattr(reach, "_INSTALLED", (*reach._INSTALLED, str(tmp_path)))
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
    monkeypatch.setattr(hook_analysis, "_MOST_READ", 0)
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


# Outputs of a module taken apart, and gradients that come back to them.


def scalar():
    return torch.ones((), requires_grad=True) * 2.0


def logits():
    return torch.ones(3, 2, requires_grad=True) * 2.0


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (scalar(), 0),
        (logits(), None),
        ((logits(), scalar()), 1),
        ({"logits": logits(), "loss": scalar()}, 1),
        ({"loss": scalar(), "penalty": scalar()}, 0),
        (OrderedDict(penalty=scalar(), loss=scalar()), 1),
        ((scalar(), scalar()), None),
        ((logits(), torch.ones(())), None),
        ((None, scalar()), 1),
    ],
)
def test_the_loss_is_the_only_scalar_with_a_gradient_or_is_called_so(output, loss):
    assert form_of(output).loss == loss


def test_an_output_comes_back_from_the_parts_of_a_step_result():
    output = {"logits": logits(), "loss": scalar(), "count": 3}
    form = form_of(output)
    result = as_step_result(form, output)
    assert result["loss"] is output["loss"]
    leaves = from_step_result(form, result.pop("loss"), result)
    assert tree_unflatten(leaves, form.spec) == output
    with pytest.raises(TraceError, match="must return the same on every call"):
        as_step_result(form, output["logits"])


def test_objects_that_cannot_travel_are_refused_when_they_are_used():
    output = {"loss": scalar(), "cache": object()}
    form = form_of(output)
    result = as_step_result(form, output)
    assert list(result) == ["loss"]
    found = tree_unflatten(from_step_result(form, result["loss"], {}), form.spec)
    for use in (bool, len, iter, lambda cache: cache[0], lambda cache: cache.keys):
        with pytest.raises(TraceError, match="an object that the module returned beside its loss"):
            use(found["cache"])


def test_gradients_arrive_at_the_outputs_they_came_through():
    told = []
    arrival = Arrival(tell=told.append)
    first, count, second = connected([logits(), 3, scalar()], arrival)
    assert count == 3
    (first * 5.0).sum().backward()
    assert told == [arrival]
    assert arrival.gradients[1] is None
    assert torch.equal(arrival.gradients[0], torch.full((3, 2), 5.0))
    with pytest.raises(TraceError, match="backward ran twice through one forward"):
        second.backward()


def test_outputs_can_be_written_over():
    arrival = Arrival()
    first, _ = connected([logits(), logits()], arrival)
    first /= 2.0
    first.sum().backward()
    assert torch.equal(arrival.gradients[0], torch.full((3, 2), 0.5))


def test_a_backward_that_cannot_be_is_refused():
    output = connected({"x": logits(), "n": 2}, Arrival(refusal="not this one"))
    assert output["n"] == 2
    with pytest.raises(TraceError, match="not this one"):
        output["x"].sum().backward()


def test_outside_gradients_go_on_into_the_module():
    weight, arrival = torch.ones(2, requires_grad=True), Arrival()
    arrival.gradients = [torch.tensor([3.0, 4.0]), None]
    OutsideLoss.apply(arrival, weight * 2.0, weight * 10.0).backward()
    assert weight.grad.tolist() == [6.0, 8.0]


def test_the_loss_for_planning_depends_on_all_that_can_be_differentiated():
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    stand_in_loss({"a": first * 2.0, "b": [second * 3.0], "c": torch.ones(2)}).backward()
    assert (first.grad.tolist(), second.grad.tolist()) == ([2.0, 2.0], [3.0, 3.0, 3.0])
    assert stand_in_loss(torch.ones(2)) is None
