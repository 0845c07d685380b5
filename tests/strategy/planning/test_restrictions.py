from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning, StochasticWeightAveraging

from lightning_mist.strategy.planning.plain_parallelism import whole_module_reason
from tests.own_optimizers import Coupled

PARAMETER = torch.nn.Parameter(torch.zeros(1))
SGD = torch.optim.SGD([PARAMETER], lr=0.1)


def trainer(*callbacks, automatic=True, module=None):
    if module is None:
        module = torch.nn.Identity()
        module.automatic_optimization = automatic
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


def test_a_module_that_steps_by_itself_may_have_several_optimizers_under_a_plan_that_is_given():
    manual = trainer(automatic=False)
    assert whole_module_reason(manual, [SGD, SGD], manual=None) is None
    assert "LBFGS" in whole_module_reason(manual, [SGD, torch.optim.LBFGS([PARAMETER])], manual=None)
    assert "0 optimizers" in whole_module_reason(manual, [], manual=None)
