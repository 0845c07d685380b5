import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.runtime.stage.pipeline_stage import StepExit, StepRun, Watcher, enter_graph
from lightning_mist.without_values import become


def fake(*shape):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape)


def test_a_ghost_becomes_what_was_received_wherever_it_is_held():
    h = fake(2, 3)
    holder = {"list": [h], "view": h[0]}
    become(h, torch.ones(2, 3))
    assert type(holder["list"][0]) is torch.Tensor
    assert holder["list"][0].sum() == 6
    assert isinstance(holder["view"], FakeTensor)


def test_a_real_tensor_that_met_a_ghost_may_become_another():
    acc = torch.zeros(3)
    _ = acc * fake(3)
    become(acc, torch.ones(3))
    assert acc.sum() == 3


def test_what_enters_the_graph_may_be_written_to():
    leaf = torch.ones(3)
    h = enter_graph(leaf)
    h[0] = 5.0
    h.mul_(2)
    (h * h).sum().backward()
    assert leaf.grad.tolist() == [0.0, 8.0, 8.0]
    assert h.data_ptr() == leaf.data_ptr()


def test_wanted_values_are_found_by_name():
    def step(x):
        y = x * 2
        a, b = y.chunk(2)
        a[0] = 7.0
        return a, b

    first = sys._getframe().f_lineno - 5
    places = {"mul": first, "chunk": first + 1, "__setitem__": first + 2}
    wanted = [
        ("glue", -1, name, (__name__, "step", line), 0, leaf) for name, line in places.items() for leaf in range(2)
    ]
    x = torch.ones(2, 2)
    run = StepRun(frozenset(wanted), None, None)
    with Watcher(run):
        a, b = step(x)
    found = {(key[2], key[-1]): value for key, value in run.objects.items()}
    assert set(found) == {("mul", 0), ("chunk", 0), ("chunk", 1), ("__setitem__", 0)}
    assert found["chunk", 1] is b
    assert found["__setitem__", 0] is a


def test_ghosts_are_indexed_by_masks_with_values():
    h, mask = fake(3, 4), torch.tensor([True, False, True])
    with Watcher(StepRun(frozenset(), None, None)):
        assert h[mask].shape == (2, 4)
        assert torch.masked_select(h, mask[:, None]).shape == (8,)
        h[mask, 0] = 1.0


def test_errors_pass_user_code():
    run = StepRun(frozenset(), None, None)

    def user():
        try:
            raise run.fail("what and why")
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(StepExit):
        user()
    assert not issubclass(StepExit, Exception)
    assert isinstance(run.error, TraceError)
    assert str(run.error) == "what and why"
