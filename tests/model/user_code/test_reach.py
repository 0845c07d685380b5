import functools
import itertools
from types import SimpleNamespace

import torch
from torch import nn

from lightning_mist.model.user_code.reach import Code, NameSpace, Reach, is_users, loaded_names, names_in, reached

HELD = {"count": 0}
OTHER = {"count": 0}
UNUSED = {"count": 0}


class Helper:
    total = 0

    def bump(self):
        type(self).total += 1
        return OTHER["count"]


def free(numbers=[]):  # noqa: B006
    numbers.append(1)
    return free.calls


def closing():
    inside = 0

    def closed():
        nonlocal inside
        inside += 1
        return inside

    return closed


class Net(nn.Module):
    marks = 0

    def __init__(self):
        super().__init__()
        self.layer, self.closed = nn.Linear(2, 2), closing()
        self.numbers = itertools.count()

    def training_step(self, batch, batch_idx):
        if batch_idx > 5:
            return self.late(batch)
        return functools.partial(free)() + self.closed()

    def late(self, batch):
        HELD["count"] += 1
        return Helper().bump() + self.marked

    @property
    def marked(self):
        return type(self).marks

    def never(self):
        return UNUSED


def reach_of(module, **roots):
    return Reach(module, module.training_step, roots)


def places(reach):
    return {(space.label, name) for space in reach.spaces for name, _ in reach.named(space)}


def test_what_code_names_is_found_though_no_batch_has_come_there():
    found = places(reach_of(Net()))
    here = f"globals of {__name__}"
    assert {
        (here, "HELD"),
        (here, "OTHER"),
        ("class Helper", "total"),
        ("class Net", "marks"),
        ("closure of closing.<locals>.closed", "inside"),
        ("defaults of free", "numbers"),
        ("the module", "closed"),
    } <= found
    assert (here, "UNUSED") not in found


def test_names_are_looked_up_when_asked():
    reach = reach_of(Net())
    free.calls = 3
    try:
        assert ("function free", "calls") in places(reach)
    finally:
        del free.calls


def test_further_places_count_where_code_gets_to_them():
    trainer, callback = {"marks": 1, "other": 2}, {"marks": 1}
    reach = reach_of(Net(), trainer=(trainer, frozenset(("batch_idx", "late"))), callback=(callback, frozenset(("x",))))
    assert ("trainer", "marks") in places(reach)
    assert ("trainer", "other") not in places(reach)
    assert ("callback", "marks") not in places(reach)


def test_spaces_are_written_and_emptied():
    cell = (lambda: cell).__closure__[0]
    for space in (
        NameSpace("class", type("Made", (), {})),
        NameSpace("dict", {}),
        NameSpace("cell", cell, frozenset(("a",))),
    ):
        space.put("a", 5)
        assert space.values()["a"] == 5
        space.remove("a")
        assert "a" not in space.values()
        space.put("a", None)


def test_libraries_are_not_followed():
    assert not is_users(torch)
    assert not is_users(itertools.chain)
    assert not is_users(SimpleNamespace)
    assert is_users(Net)
    assert is_users(Net.training_step)


def test_the_reach_of_a_part():
    net = Net()
    space = next(s for s in reach_of(net).spaces if s.label == f"globals of {__name__}")
    layer = Reach(net.layer, net.layer.forward, {})
    assert not layer.has("HELD", space)
    assert reach_of(net).has("HELD", space)


class Keeps(nn.Module):
    """Makes a list that only a hook outside of the step fills."""

    def __init__(self):
        super().__init__()
        self.kept, self.used = [], []

    def training_step(self, batch, batch_idx):
        self.used.append(1)

    def on_train_batch_end(self):
        self.kept.append(1)


def test_what_only_constructors_mention_is_not_reached():
    module = Keeps()
    reach = Reach(module, module.training_step, {})
    assert "used" in reach.names
    assert "kept" not in reach.names


F = {"count": 0}


@torch.no_grad()
def entropy(logits):
    return logits.sum() + OTHER["count"]


def counted(function):
    """A decorator of the user's own, with a name that the step reads, too."""
    calls = {"count": 0}

    @functools.wraps(function)
    def inner(*args):
        calls["count"] += 1
        return function(*args)

    return inner


@counted
def scaled(values):
    return values


@functools.singledispatch
def described(value):
    return HELD["count"]


class Decorated(nn.Module):
    @torch.inference_mode()
    def measure(self, batch):
        return entropy(batch) + scaled(batch) + described(batch)

    def training_step(self, batch, batch_idx):
        return F, self.measure(batch), __file__, __name__, __spec__


def test_decorated_functions_are_followed_in_the_namespace_that_they_come_from():
    found = places(reach_of(Decorated()))
    here = f"globals of {__name__}"
    assert {(here, "F"), (here, "OTHER"), (here, "HELD"), ("closure of scaled", "calls")} <= found
    assert not [label for label, _ in found if "torch" in label or "functools" in label]
    spaces = [space for space in reach_of(Decorated()).spaces if space.label == here]
    assert [space.holder["F"] for space in spaces] == [F]


def test_names_that_modules_have_from_being_imported_are_no_state():
    names = {name for _, name in places(reach_of(Decorated()))}
    assert not names & {"__file__", "__name__", "__spec__", "__builtins__", "__doc__"}


def test_of_functions_without_source_the_names_are_known():
    space = {}
    exec("def f(a, b):\n    c = lambda: b.d\n    return c", space)
    assert {"b", "c", "d"} <= loaded_names(space["f"].__code__)
    assert "a" not in loaded_names(space["f"].__code__)


def test_texts_and_what_is_written_inside_count_as_names():
    def names(value):
        return [getattr(value, "one"), lambda: value.two, value in ("three", "no name")]  # noqa: B009

    assert {"one", "two", "three"} <= names_in(names.__code__)
    assert "no name" not in names_in(names.__code__)


def calls_of(function, *holders, **limits):
    return [item.code.co_name for item in reached([Code.of(function, holders)], **limits)]


def test_calls_are_followed_by_name():
    def inside():
        return Helper().bump()

    def start(module):
        torch.add(1, 2)
        return inside() + functools.partial(free)() + module.late(1)

    net = Net()
    assert set(calls_of(start)) == {"start", "inside", "free", "bump"}
    assert set(calls_of(start, net)) == {"start", "inside", "free", "bump", "late", "marked"}
    assert set(calls_of(start, depth=1)) == {"start", "inside", "free"}
    assert calls_of(start, depth=0) == ["start"]


class Made:
    def __init__(self):
        self.total = free()

    def __call__(self):
        return self.total


def test_constructors_of_what_exists_count_where_that_is_asked_for():
    def calls(made):
        return made()

    def makes():
        return Made()()

    made = Made.__new__(Made)
    assert set(calls_of(calls, made)) == {"calls", "__call__"}
    assert set(calls_of(calls, made, from_making=True)) == {"calls", "__init__", "free", "__call__"}
    assert set(calls_of(makes)) == {"makes", "__init__", "free", "__call__"}
