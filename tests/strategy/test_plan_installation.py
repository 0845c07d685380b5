import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_mist.errors import TraceError
from lightning_mist.strategy.plan_installation import refuse_unreduced


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


@pytest.mark.usefixtures("single_rank")
def test_a_parameter_for_which_ddp_would_wait_is_named():
    x = torch.ones(1, 2)
    module = DistributedDataParallel(Two())
    module(x, True).sum().backward()
    refuse_unreduced(module)
    with module.no_sync():
        module(x, False).sum().backward()
    refuse_unreduced(module)
    module.zero_grad()
    module(x, False).sum().backward()
    with pytest.raises(TraceError, match=r"second\.weight took no part .* find_unused_parameters=True"):
        refuse_unreduced(module)
    prepared = DistributedDataParallel(Two(), find_unused_parameters=True)
    prepared(x, False).sum().backward()
    refuse_unreduced(prepared)
    refuse_unreduced(Two())
