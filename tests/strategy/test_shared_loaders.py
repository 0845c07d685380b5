from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torchmetrics
from torch import nn

from lightning_mist.errors import PlanError
from lightning_mist.strategy.strategy import SharedLoaders


class Base:
    """Says over which group it was asked to reduce."""

    def __init__(self, rank, world_size, loaders):
        self.global_rank, self.world_size, self._request = rank, world_size, SimpleNamespace(loaders=loaders)
        self._timeout, self._fitting = None, ExitStack()

    @property
    def distributed_sampler_kwargs(self):
        return "Lightning's"

    def reduce(self, tensor, group=None, reduce_op="mean"):
        return tensor, group, reduce_op

    def all_gather(self, tensor, group=None, sync_grads=False):
        return tensor, group, sync_grads

    def reduce_boolean_decision(self, decision, all=True):
        return self.reduce(decision, reduce_op="sum")


class Strategy(SharedLoaders, Base):
    pass


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: made.append(tuple(ranks)) or tuple(ranks))
    return made


def test_neighbouring_ranks_have_the_samples_of_one_rank():
    found = [Strategy(rank, 6, 3).distributed_sampler_kwargs for rank in range(6)]
    assert found == [{"num_replicas": 3, "rank": rank} for rank in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("loaders", [None, 4])
def test_where_every_rank_loads_everything_is_lightnings(loaders, groups):
    strategy = Strategy(1, 4, loaders)
    strategy.begin_sharing(nn.Linear(1, 1))
    assert (strategy.num_loaders, strategy.distributed_sampler_kwargs, groups) == (None, "Lightning's", [])
    assert strategy.reduce(5) == (5, None, "mean")


@pytest.mark.parametrize("loaders", [0, 3, 8])
def test_loaders_divide_the_ranks(loaders):
    with pytest.raises(PlanError, match=f"data_parallel_size = {loaders} on 4 processes.*it must divide 4"):
        Strategy(0, 4, loaders).begin_sharing(nn.Linear(1, 1))


def test_reductions_are_over_one_rank_of_each_loader(groups):
    strategy = Strategy(3, 6, 3)
    strategy.begin_sharing(nn.Linear(1, 1))
    strategy.begin_sharing(nn.Linear(1, 1))
    assert groups == [(0, 2, 4), (1, 3, 5)]  # once, and all by every rank
    assert strategy.reduce(5, reduce_op="sum") == (5, (1, 3, 5), "sum")
    assert strategy.all_gather(5, sync_grads=True) == (5, (1, 3, 5), True)
    assert strategy.all_gather(5, dist.group.WORLD) == (5, (1, 3, 5), False)
    assert strategy.reduce(5, "own") == (5, "own", "mean")
    # Lightning holds the sum against the number of processes.
    assert strategy.reduce_boolean_decision(True) == (True, None, "sum")
    assert strategy.reduce(5)[1] == (1, 3, 5)


def test_metrics_of_the_module_reduce_so_while_it_is_trained():
    own, given = torchmetrics.SumMetric(), torchmetrics.SumMetric(process_group="given")
    module = nn.ModuleDict({"own": own, "given": given})
    strategy = Strategy(0, 4, 2)
    strategy.begin_sharing(module)
    assert (own.process_group, given.process_group) == ((0, 2), "given")
    strategy._fitting.close()
    assert (own.process_group, given.process_group) == (None, "given")
