from types import SimpleNamespace

import pytest
import torch

from lightning_mist.errors import InfeasibleError, TraceError
from lightning_mist.hardware import parse_cluster
from lightning_mist.strategy.planning.memory_budget import Budget
from lightning_mist.strategy.planning.planning_state import FitPlanner


def fits(answer, *, masters=False):
    def tried(work):
        if isinstance(answer, Exception):
            raise answer
        return answer

    planner = SimpleNamespace(
        budget=Budget(cluster=parse_cluster("1x2xL4"), asked=1000),
        module=torch.nn.Linear(5, 2, bias=False),  # 40 bytes, counted four times
        tried=tried,
        step_bytes=[],
        request=SimpleNamespace(master_weights=masters),
    )
    planner._counted = lambda: FitPlanner._counted(planner)
    return FitPlanner._fits_plainly(planner)


def test_what_cannot_be_counted_quickly_does_not_fit_for_certain():
    assert fits(340)
    assert not fits(341)
    # Nine times with masters, of which sums and state are twice as large as weights.
    assert fits(140, masters=True)
    assert not fits(141, masters=True)
    # A step that reads values back does not run on fakes; it is searched for, and not trained plainly for that.
    assert not fits(TraceError("the step does not run on fake tensors"))
    with pytest.raises(InfeasibleError):
        fits(InfeasibleError("nothing fits"))


def test_why_ranks_update_whole_parameters_is_said():
    module = torch.nn.Linear(5, 2)
    hooked, *others = (getattr(torch.optim, name)(module.parameters()) for name in ("AdamW", "AdamW", "Adafactor"))
    hooked.register_step_pre_hook(print)
    planner = SimpleNamespace(module=module, strategy=SimpleNamespace(optimizers=others[:1]))
    assert list(FitPlanner._whole_reasons(planner)) == []
    planner.strategy.optimizers = [hooked, *others]
    module.bias.data = module.weight.data[:, 0]
    assert list(FitPlanner._whole_reasons(planner)) == [
        "not every parameter lies in memory of its own, in one piece",
        "AdamW steps with hooks or methods that are not torch's",
        "Adafactor is not known to treat every entry by itself",
    ]
