from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging

from lightning_mist.strategy.restrictions import whole_module_reason
from tests.model.test_elementwise import Coupled

PARAMETER = torch.nn.Parameter(torch.zeros(1))
SGD = torch.optim.SGD([PARAMETER], lr=0.1)


def trainer(*callbacks, automatic=True, module=None):
    module = module or SimpleNamespace(automatic_optimization=automatic)
    return SimpleNamespace(lightning_module=module, callbacks=[ModelCheckpoint(), *callbacks])


@pytest.mark.parametrize(
    ("callbacks", "automatic", "optimizers", "expected"),
    [
        ((), True, [SGD], None),
        ((), False, [SGD], "automatic_optimization=False"),
        ((), True, [SGD, SGD], "2 optimizers"),
        ((), True, [torch.optim.LBFGS([PARAMETER])], "LBFGS"),
        ((), True, [Coupled([PARAMETER])], "Coupled couples parameters"),
        ((StochasticWeightAveraging(swa_lrs=0.1),), True, [SGD], "StochasticWeightAveraging: it averages"),
        ((ModelPruning("l1_unstructured"),), True, [SGD], "ModelPruning: it masks"),
        ((BackboneFinetuning(),), True, [SGD], "BackboneFinetuning: it changes"),
    ],
)
def test_what_needs_the_whole_module_is_named(callbacks, automatic, optimizers, expected):
    reason = whole_module_reason(trainer(*callbacks, automatic=automatic), optimizers)
    assert (reason is None) if expected is None else (expected in reason)


class ClipsByItself(pl.LightningModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class ClipsWithLightning(pl.LightningModule):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.current_epoch > 1:
            self.clip_gradients(optimizer, 1.0, "norm")


@pytest.mark.parametrize(("module", "is_named"), [(ClipsByItself, True), (ClipsWithLightning, False)])
def test_clipping_by_the_module_itself_needs_all_gradients(module, is_named):
    reason = whole_module_reason(trainer(module=module()), [SGD])
    assert (reason is not None and "configure_gradient_clipping" in reason) == is_named
