"""What later versions of Lightning pass: to Lightning's own code, or, where a plan would have to honour it, refused."""

import inspect
import re

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import Precision

from lightning_mist import MistStrategy
from lightning_mist.strategy.lightning import MistStrategy as OfTrainer
from lightning_mist.strategy.lightning_fabric import MistFabricStrategy as OfFabric
from lightning_mist.strategy.training.whole_model import _Whole, attach_engine
from tests.strategy.checkpoints.test_checkpoint_hooks import fit
from tests.strategy.test_strategy import one_stage
from tests.strategy.training.test_precision import Engine, optimizer_with_gradient

pytestmark = pytest.mark.filterwarnings("ignore")


OWN = ("lightning_module_state_dict", "optimizer_state", "load_optimizer_state_dict", "get_optimizer_state")
"""Without a plan they are Lightning's, and by one ours alone: what they do not know they do not take."""


def overrides():
    """Methods of ours that do what Lightning's do, and something besides: names, parameters, calls of Lightning's."""
    for cls, lightnings in ((OfTrainer, OfTrainer), (OfFabric, OfFabric), (_Whole, Precision)):
        known = {
            name
            for kind in lightnings.__mro__
            if not kind.__module__.startswith("lightning_mist")
            for name in vars(kind)
        }
        for kind in cls.__mro__:
            for name, found in vars(kind).items() if kind.__module__.startswith("lightning_mist") else ():
                method = inspect.unwrap(found)
                if name in known and name not in OWN and name[:2] != "__" and inspect.isfunction(method):
                    above = rf"(?:super\(\)\.{name}|getattr\(super\(\), .*?\))"
                    calls = re.findall(rf"{above}\((.*?)\)\n", inspect.getsource(method), re.S)
                    yield f"{kind.__name__}.{name}", inspect.signature(method), calls


def test_what_is_passed_besides_is_passed_on():
    found = {name: (signature, calls) for name, signature, calls in overrides() if calls}
    known = {"EndsTogether.barrier", "Checkpoints.load_model_state_dict", "PlanEvaluation.on_test_end"}
    assert known <= found.keys()
    for name, (signature, calls) in found.items():
        more = [item.name for item in signature.parameters.values() if item.kind is item.VAR_KEYWORD]
        assert more, f"{name} takes nothing besides"
        assert [call for call in calls if f"**{more[0]}" not in call] == [], name


def later_clip(self, optimizer, clip_val=0.0, gradient_clip_algorithm="norm", module=None, **more):
    name = {"norm": "clip_grad_by_norm", "value": "clip_grad_by_value"}[
        getattr(gradient_clip_algorithm, "value", "norm")
    ]
    getattr(self, name)(optimizer, clip_val, module=module, **more)


@pytest.fixture
def lightning_clips_a_module(monkeypatch):
    """Whose gradients are clipped is said, as strategies that wrap a module want to know."""
    monkeypatch.setattr(Precision, "clip_gradients", later_clip)
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        now = getattr(Precision, name)
        monkeypatch.setattr(
            Precision, name, lambda self, optimizer, clip_val, module=None, now=now: now(self, optimizer, clip_val)
        )


@pytest.mark.usefixtures("lightning_clips_a_module")
def test_the_module_whose_gradients_are_clipped_may_be_named():
    plugin, engine = Precision(), Engine()
    optimizer, parameter = optimizer_with_gradient(3.0)
    attach_engine(plugin, engine)
    plugin.clip_gradients(optimizer, 1.0, module=torch.nn.Linear(1, 1))
    assert engine.clipped == [(optimizer, 1.0)]
    with pytest.raises(
        TypeError, match="Lightning passes foreach, of which this version of lightning-mist does not know"
    ):
        plugin.clip_gradients(optimizer, 1.0, foreach=True)
    assert parameter.grad.tolist() == [3.0, 3.0]
    attach_engine(plugin, None)
    plugin.clip_gradients(optimizer, 1.0, module=torch.nn.Linear(1, 1))
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-4)


class Later(LightningEnvironment):
    """Knows how many nodes there are."""

    def num_nodes(self):
        return 1


@pytest.mark.parametrize("is_directory", [False, True])
def test_a_state_to_fill_may_be_given_to_what_loads(tmp_path, monkeypatch, is_directory):
    kind = next(kind for kind in MistStrategy.__mro__ if kind.__name__ == "Strategy")
    given = []

    def load(self, checkpoint_path, weights_only=None, state=None):
        given.append(state)
        return self.checkpoint_io.load_checkpoint(checkpoint_path)

    monkeypatch.setattr(kind, "load_checkpoint", load)
    trainer, _ = fit(tmp_path, callbacks=[], save_distributed_checkpoint=is_directory, cluster_environment=Later())
    assert trainer.strategy.num_nodes == 1
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt")
    found = trainer.strategy.load_checkpoint(path, weights_only=False, state={"state_dict": {}})
    assert found["global_step"] == trainer.global_step
    assert given == ([] if is_directory else [{"state_dict": {}}])
    with pytest.raises(TypeError, match="Lightning passes dream"):
        trainer.strategy.load_checkpoint(path, dream=1)


def test_what_a_checkpoint_is_written_with_reaches_lightning_or_is_refused(tmp_path, monkeypatch):
    kind = next(kind for kind in MistStrategy.__mro__ if kind.__name__ == "Strategy")
    given = []
    monkeypatch.setattr(kind, "save_checkpoint", lambda self, *args, **more: given.append(more))
    MistStrategy(plan=one_stage()).save_checkpoint({}, tmp_path / "a.ckpt", compressed=True)
    assert given == [{"compressed": True}]
    with pytest.raises(TypeError, match="Lightning passes compressed"):
        MistStrategy(save_distributed_checkpoint=True).save_checkpoint({}, tmp_path / "b.ckpt", compressed=True)
