import pytest
import torch

from benchmarks.reach.models import ARCHITECTURES, BATCH, Training, loader
from benchmarks.reach.run import PLANS


def test_there_are_twenty_architectures_and_no_two_alike():
    assert len(ARCHITECTURES) >= 20
    assert len({architecture.name for architecture in ARCHITECTURES}) == len(ARCHITECTURES)


@pytest.mark.sample
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_each_learns_from_its_rows(architecture):
    torch.manual_seed(0)
    module = Training(architecture.make().double())
    output = module.network(**next(iter(loader(architecture.rows()))))
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_plans_share_out_all_blocks_and_rows(name, blocks):
    plan = PLANS[name](blocks)
    assert plan.num_layers == blocks
    assert plan.global_batch_size == 2 * BATCH
