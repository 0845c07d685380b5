"""Outputs of a module taken apart, and gradients that come back to them."""

from collections import OrderedDict

import pytest
import torch
from torch.utils._pytree import tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.strategy.fabric.outputs import (
    Arrival,
    OutsideLoss,
    as_step_result,
    connected,
    connected_output,
    form_of,
    from_step_result,
    stand_in_loss,
)


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
    first, count, second = connected([logits(), 3, scalar()], [True, False, True], arrival)
    assert count == 3
    (first * 5.0).sum().backward()
    assert told == [arrival]
    assert arrival.gradients[1] is None
    assert torch.equal(arrival.gradients[0], torch.full((3, 2), 5.0))
    with pytest.raises(TraceError, match="backward ran twice through one forward"):
        second.backward()


def test_outputs_can_be_written_over():
    arrival = Arrival()
    first, _ = connected([logits(), logits()], [True, True], arrival)
    first /= 2.0
    first.sum().backward()
    assert torch.equal(arrival.gradients[0], torch.full((3, 2), 0.5))


def test_a_backward_that_cannot_be_is_refused():
    output = connected_output({"x": logits(), "n": 2}, Arrival(refusal="not this one"))
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
