import pytest
import torch
from torch import nn

from lightning_mist.runtime.parameters.buffers import BufferSync
from tests.memory_transport import InMemoryWorld, drive


class Net(nn.Module):
    """Buffers of several types and forms, which differ by rank."""

    def __init__(self, rank):
        super().__init__()
        self.inner = nn.BatchNorm1d(3)
        self.inner.running_mean += rank
        self.inner.num_batches_tracked += rank
        self.register_buffer("flag", torch.tensor([rank == 0]), persistent=False)
        self.register_buffer("sizes", torch.full((1, 3), float(rank), dtype=torch.bfloat16))
        self.register_buffer("across", torch.full((2, 3), float(rank), dtype=torch.float64).t())
        self.register_buffer("expanded", torch.full((1, 1), float(rank)).expand(5, 2))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("none", None)


def values(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def make(size=3, **options):
    modules = [Net(rank) for rank in range(size)]
    world = InMemoryWorld(size)
    syncs = [
        BufferSync(module, transport, **options) for module, transport in zip(modules, world.transports, strict=True)
    ]
    return modules, syncs


def forward(syncs, *, evaluates=False):
    """What a forward does on every rank."""
    drive([sync.before_forward() for sync in syncs])
    for sync in syncs:
        with torch.set_grad_enabled(not evaluates):
            sync.after_forward()


def disturb(modules):
    for rank, module in enumerate(modules):
        module.sizes += rank + 1


def are_alike(modules):
    return len({float(module.sizes[0, 0]) for module in modules}) == 1


def test_every_buffer_is_that_of_rank_zero():
    modules, syncs = make()
    before, versions = values(modules[0]), [modules[1].sizes._version]
    forward(syncs)
    for module in modules:
        torch.testing.assert_close(values(module), before, rtol=0, atol=0)
    assert [modules[1].sizes._version] == versions


def test_they_are_alike_before_forwards_that_follow_one_with_averaged_gradients():
    """As DistributedDataParallel: not after an evaluation, and not after a batch that is only accumulated."""
    modules, syncs = make()
    forward(syncs)
    disturb(modules)
    forward(syncs, evaluates=True)
    assert are_alike(modules)
    disturb(modules)
    forward(syncs)
    assert not are_alike(modules)
    forward(syncs)
    assert are_alike(modules)
    with syncs[0].accumulating(), syncs[1].accumulating(), syncs[2].accumulating():
        forward(syncs)
    disturb(modules)
    forward(syncs)
    assert not are_alike(modules)
    forward(syncs)
    assert are_alike(modules)


@pytest.mark.parametrize("options", [{"is_enabled": False}, {}])
def test_buffers_stay_as_they_are_where_that_is_asked_for(options):
    modules, syncs = make(**options)
    for module in modules:
        module._ddp_params_and_buffers_to_ignore = ["sizes"]
    forward(syncs)
    assert not are_alike(modules)
    assert bool(modules[1].flag) == bool(options == {})


def test_replaced_buffers_are_found():
    modules, syncs = make()
    forward(syncs)
    for rank, module in enumerate(modules):
        module.sizes = torch.full((4,), float(rank))
    forward(syncs)
    assert [module.sizes.tolist() for module in modules] == [[0.0] * 4] * 3
