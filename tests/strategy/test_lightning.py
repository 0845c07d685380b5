"""Both modules that hold the strategy: the same promises for either copy of Lightning."""

import importlib
import inspect
import pickle
import re

import pytest

from lightning_mist.strategy.strategy import MistBase

COPIES = {
    "lightning_mist.strategy.lightning": "lightning.pytorch",
    "lightning_mist.strategy.pytorch_lightning": "pytorch_lightning",
}


FOR_LOOPS = ["lightning_mist.strategy.fabric_of_lightning", "lightning_mist.strategy.lightning_fabric"]


@pytest.fixture(params=sorted(COPIES))
def name(request):
    return request.param


def strategy_of(name):
    return importlib.import_module(name).MistStrategy


def test_the_class_is_a_ddp_strategy_of_its_copy_only(name):
    found = strategy_of(name)
    copies = {root: importlib.import_module(f"{root}.strategies").DDPStrategy for root in COPIES.values()}
    assert issubclass(found, MistBase)
    assert issubclass(found, copies[COPIES[name]])
    assert [root for root, base in copies.items() if issubclass(found, base)] == [COPIES[name]]
    assert found.strategy_name == "mist"


def test_the_class_is_found_by_its_name(name):
    found = strategy_of(name)
    assert (found.__module__, found.__qualname__) == (name, "MistStrategy")
    assert pickle.loads(pickle.dumps(found)) is found
    assert type(pickle.loads(pickle.dumps(found(memory_limit="1GiB")))) is found


@pytest.mark.parametrize("module", [*sorted(COPIES), *FOR_LOOPS])
def test_each_argument_is_described_and_has_a_type(module):
    found = getattr(importlib.import_module(module), "MistFabricStrategy" if module in FOR_LOOPS else "MistStrategy")
    parameters = list(inspect.signature(found).parameters.values())
    documented = re.findall(r"^\s{8}(\*{0,2}\w+): \S", inspect.getdoc(found).replace("\n    ", "\n        "), re.M)
    assert documented == [("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters]
    assert not [p.name for p in parameters if p.annotation is p.empty]


def test_what_means_nothing_is_refused(name):
    with pytest.raises(ValueError, match="save_asynchronously=True with save_distributed_checkpoint=False"):
        strategy_of(name)(save_asynchronously=True)


def test_before_a_fit_there_is_nothing_to_ask_for(name):
    strategy = strategy_of(name)()
    assert strategy.plan is None
    assert strategy.report is None
