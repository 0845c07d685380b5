"""What a rank's engine does to the module between steps, on two real ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_mist import MistStrategy, PlanError
from lightning_mist.model import map_module
from lightning_mist.runtime.parameters.absent_parameters import at_work
from lightning_mist.strategy.training import Engine, connected, module_state
from tests.plans import plan_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

    def training_step(self, batch):
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def _hollow_rank():
    torch.manual_seed(0)
    module = Net()
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    device = torch.device("cpu")
    plan = plan_of(4, 2, {"layers": 2, "devices": [1]}, {"layers": 2, "devices": [0]})
    found = map_module(module, module.training_step, torch.randn(2, 4))
    engine = Engine(module, plan, found, connected(plan, found, device), device=device)
    engine.hollow()
    foreign = module.blocks[3][0] if engine.executor.mesh.stage == 0 else module.first
    with pytest.raises(PlanError, match=r"state_dict\(\) of a Linear while rank . trains stage . of 2"):
        module.state_dict()
    with pytest.raises(PlanError, match="on_fit_end"):
        foreign.state_dict()
    saved = module_state(module, engine)
    with pytest.raises(PlanError, match=r"trainer\.save_checkpoint"):
        module.state_dict()

    # Weights may be loaded while stages train.
    changed = {name: value + 1 for name, value in whole.items()}
    strategy = MistStrategy()
    strategy._engine, strategy._lightning_module = engine, SimpleNamespace(load_state_dict=module.load_state_dict)
    strategy.load_model_state_dict({"state_dict": changed})
    assert not engine.is_filled
    with at_work():
        assert bool(next(foreign.parameters()).isnan().all())
    engine.fill()
    now = module.state_dict()
    assert all(torch.equal(now[name], value) for name, value in changed.items())
    return {name: torch.equal(saved[name], value) for name, value in whole.items()}


def test_a_hollow_module_gives_no_state_but_takes_and_saves_it(gloo_workers):
    main, _ = gloo_workers.run(2, _hollow_rank)
    assert all(main.values())
