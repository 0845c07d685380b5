"""Objects of the user's that answer nothing are asked nothing, wherever the user's code reaches them."""

import warnings
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_mist.model.cuts import compiled_exclusions
from lightning_mist.model.user_code import Reach, Surroundings
from lightning_mist.strategy.user_code import Survey, changed, read_in_step, user_exclusions

HELD = SimpleNamespace(value=None)


def refusing(error, *names):
    """A class whose methods of these names raise."""

    def refuse(self, *_):
        raise error

    return type("Refusing", (), dict.fromkeys(names, refuse))


class Config(dict):
    """As many write a configuration."""

    def __getattr__(self, name):
        return self[name]


class Attributes(dict):
    """Its keys are its attributes, be they called like methods."""

    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__ = self


class Pretends:
    """Would load something to say what it is."""

    @property
    def __class__(self):
        raise RuntimeError("not loaded")

    @property
    def __dict__(self):
        raise RuntimeError("not loaded")


class Remembers(dict):
    """A dictionary that must not be walked."""

    def refuse(self, *_):
        raise AssertionError

    __iter__ = __len__ = keys = values = items = __getitem__ = __contains__ = copy = update = refuse


class Short(list):
    """A list that must not be walked."""

    __iter__ = __len__ = __getitem__ = Remembers.refuse


class Label(str):
    """A text that will not be shown, compared or hashed."""

    __slots__ = ()
    __eq__ = __repr__ = __str__ = Remembers.refuse
    __hash__ = Remembers.refuse


class Slotted:
    """Has no dictionary."""

    __slots__ = ("full", "unset")

    def __init__(self):
        self.full = 1

    def __getattr__(self, name):
        raise KeyError(name)


def gone():
    return weakref.proxy(Attributes())


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(module)


SPECIAL = ("__eq__", "__hash__", "__len__", "__bool__", "__iter__", "__repr__", "__str__", "__contains__")
OBJECTS = {
    "key": lambda: Config(scale=1.0),
    "runtime": refusing(RuntimeError("frozen"), "__getattr__"),
    "system exit": refusing(ZeroDivisionError(), "__getattribute__"),
    "special": refusing(TypeError("no"), *SPECIAL),
    "next": refusing(TypeError("no"), "__next__", "__length_hint__", "__len__", "__repr__"),
    "called": refusing(KeyError("no"), "__call__", "__getattr__"),
    "attributes": lambda: Attributes(items=1, keys=2, values=3, copy=4),
    "pretends": Pretends,
    "dead": gone,
    "dictionary": lambda: Remembers(a=1),
    "list": lambda: Short([1]),
    "text": lambda: Label("a"),
    "slotted": Slotted,
    "ordered": lambda: OrderedDict(a=[1]),
    "queue": lambda: deque([Config(a=1)]),
    "scripted": lambda: scripted(nn.Linear(2, 2)),
    "nested": lambda: {"a": [gone(), Pretends(), {"b": Config()}]},
}


class Net(pl.LightningModule):
    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if issubclass(type(held), nn.Module):
            self.held = held
        else:
            vars(self)["held"] = held  # nn.Module asks for its class

    def training_step(self, batch, batch_idx):
        return self.held, HELD.value, self.layer(batch).sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if HELD.value is not None and self.held is not None:
            self.count = batch_idx


class Holds(Callback):
    def __init__(self, held):
        self.held = held

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.held is not None and trainer is not None:
            print(batch_idx)


@pytest.fixture(params=list(OBJECTS))
def held(request):
    HELD.value = OBJECTS[request.param]()
    yield HELD.value
    HELD.value = None


def trainer_of(module, callback):
    return SimpleNamespace(
        lightning_module=module, callbacks=[callback], strategy=SimpleNamespace(model=module), datamodule=None
    )


def test_what_a_step_reaches_is_looked_at_and_put_back(held):
    module, callback = Net(held), Holds(held)
    roots = {"callback": (vars(callback), frozenset(("batch",)))}
    reach = Reach(module, module.training_step, roots)
    survey = Survey(reach)
    before = survey.look()
    around = Surroundings(reach)
    with around.run():
        pass
    assert around.settle() == ()
    around.release()
    assert changed(before, survey.look()) == []
    survey.digest()
    assert vars(callback)["held"] is held


def test_hooks_that_only_ask_whether_it_is_there_rule_nothing_out(held):
    module, callback = Net(held), Holds(held)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert user_exclusions(trainer_of(module, callback), [optimizer]) == ()
    assert read_in_step(module) is None
    assert {item.feature for item in compiled_exclusions(module)} <= {
        "pipeline", "sharded_parameters", "offloaded_parameters"
    }  # fmt: skip


def test_a_change_inside_is_seen_and_undone_whatever_the_class_makes_of_it():
    held = Remembers(a=1)
    HELD.value = held
    module = Net(None)
    reach = Reach(module, module.training_step, {})
    around, survey = Surroundings(reach), Survey(reach)
    before = survey.look()
    dict.__setitem__(held, "a", 2)
    assert changed(before, survey.look())
    around.release()
    HELD.value = None
    assert dict.items(held) == {"a": 1}.items()


@pytest.mark.parametrize("wrap", [weakref.proxy, lambda module: SimpleNamespace(inner=weakref.ref(module))])
def test_parameters_are_reached_through_what_is_alive(wrap):
    class Looks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print(list(self.held.parameters()) if hasattr(self.held, "parameters") else self.held)

    module = Net(None)
    callback = Looks()
    callback.held = wrap(module)
    found = user_exclusions(trainer_of(module, callback), [torch.optim.SGD(module.parameters(), lr=0.1)])
    assert any("on_train_batch_end of Looks" in item.reason for item in found)


def test_parameters_are_reached_through_slots_and_lazy_properties_of_the_users_own():
    class Lazy:
        def __init__(self, func):
            self.func = func

        def __get__(self, instance, owner):
            return self.func(instance)

    class Box:
        __slots__ = ("inner",)

    class Boxed(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            print(self.box)

    class Lazily(Callback):
        @Lazy
        def weights(self):
            return list(self.net.parameters())

        def on_train_epoch_end(self, trainer, pl_module):
            print(self.weights)

    module, boxed, lazily = Net(None), Boxed(), Lazily()
    boxed.box, lazily.net = Box(), module
    boxed.box.inner = module
    for callback in (boxed, lazily):
        found = user_exclusions(trainer_of(module, callback), [torch.optim.SGD(module.parameters(), lr=0.1)])
        assert any("on_train_epoch_end" in item.reason for item in found)


def test_scripted_parts_with_parameters_rule_out_that_these_are_away():
    module = Net(scripted(nn.Linear(2, 2)))
    assert all("held is TorchScript" in item.reason for item in compiled_exclusions(module))
    assert compiled_exclusions(Net(scripted(nn.ReLU()))) == ()
