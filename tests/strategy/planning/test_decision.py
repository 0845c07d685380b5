"""Plans are found again by what they follow from, and by nothing less."""

from collections import UserDict
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_mist.plan import ModuleMap, SearchSpace, plan_of
from lightning_mist.plan.codec import to_json
from lightning_mist.strategy.planning.decision import (
    Decision,
    cache_key,
    cache_path,
    cached_plan,
    searched_with,
    write_plan,
)
from lightning_mist.strategy.planning.plain_parallelism import plain_plan
from lightning_mist.strategy.planning.planning_state import FitPlanner


def test_loaders_are_the_strategys_and_not_only_what_is_searched():
    assert searched_with(None, 2) == SearchSpace(data_parallel_size=2)
    assert searched_with(SearchSpace(), None) == SearchSpace()
    assert searched_with(SearchSpace(data_parallel_size=2), 2).data_parallel_size == 2
    with pytest.raises(ValueError, match="give it to the strategy"):
        searched_with(SearchSpace(data_parallel_size=2), None)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"num_microbatches": 2}, False),
        ({"zero_stage": 1}, False),
        ({"checkpointed_layers": 1}, False),
        ({"pipeline_stages": 2}, False),
        ({"tensor_parallel_degree": 2}, False),
        ({"data_parallel_size": 1}, False),
    ],
)
def test_only_plain_data_parallelism_is_left_to_ddp(changes, plain):
    given = {"num_microbatches": 1, **changes}
    loaders = given.pop("data_parallel_size", None)
    plan = replace(plan_of(4, world_size=2, global_batch_size=8, **given), data_parallel_size=loaders)
    empty = ModuleMap(step="training_step", blocks=(), cuts=(), parameters=())
    decision = Decision(plan=plan, module_map=empty, has_unused_parameters=False, planning_seconds=0.0, plan_path=None)
    assert decision.plan.is_plain == plain


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x)


def key(*, net=Net, width=4, rows=4, length=40, lr=0.1, cls=torch.optim.AdamW, others=("bf16",), frozen=False, **more):
    module = net(width)
    module.layer.weight.requires_grad_(not frozen)
    batch = {"x": torch.zeros(rows, length), "text": ["a"] * rows}
    return cache_key(module, batch, [cls(module.parameters(), lr=lr, **more)], others)


@dataclass
class SimpleBatch:
    x: torch.Tensor
    y: torch.Tensor


class Other(Net):
    def forward(self, x):
        return self.layer(x) + 1


def test_the_same_question_has_the_same_key_and_others_have_others():
    assert key() == key() == key(lr=0.2) == key(length=41)
    different = [
        key(),
        key(width=5),
        key(rows=5),
        key(length=80),
        key(cls=torch.optim.SGD),
        key(amsgrad=True),
        key(others=("fp32",)),
        key(frozen=True),
        key(net=Other),
    ]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("kind", [dict, UserDict, SimpleBatch])
def test_sizes_count_in_batches_of_any_class(kind):
    def key_of(rows):
        return cache_key(Net(), kind(x=torch.zeros(rows, 4), y=torch.zeros(rows)), [], ())

    assert key_of(4) == key_of(4) != key_of(5)


def test_names_count_in_batches():
    named = [cache_key(Net(), {name: torch.zeros(4, 4)}, [], ()) for name in ("labels", "mask")]
    assert named[0] != named[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_batches_of_tensors_without_a_plain_shape_have_keys(layout):
    def key_of(rows):
        parts = [torch.ones(2 + row, 3) for row in range(rows)]
        is_nested = layout in (torch.jagged, torch.strided)
        x = (
            torch.nested.nested_tensor(parts, layout=layout)
            if is_nested
            else torch.ones(rows, 3).to_sparse(layout=layout)
        )
        return cache_key(Net(), {"x": x, "none": torch.ones(())}, [], ())

    assert key_of(2) == key_of(2) != key_of(3)


def test_a_kept_plan_comes_back_and_a_broken_one_is_said(tmp_path):
    here = (("world_size", "2"), ("num_layers", "3"), ("precision", "32-true"))
    plan, path = replace(plain_plan(2, 4, 3), fingerprint=here), cache_path(tmp_path, "a")
    assert cached_plan(path, here) == (None, None)
    write_plan(plan, path)
    assert cached_plan(path, here) == (plan, None)
    for text in ("{", "[" * 3000, to_json(plain_plan(4, 4, 3)), to_json(plan).replace("32-true", "16-mixed")):
        path.write_text(text)
        found, warning = cached_plan(path, here)
        assert found is None
        assert "is not used" in warning
    (tmp_path / "file").write_text("")
    said = []
    planner = SimpleNamespace(
        strategy=SimpleNamespace(is_global_zero=True),
        progress=SimpleNamespace(say=said.append),
        _cache_path=lambda found: cache_path(tmp_path / "file", "a"),
    )
    FitPlanner.cache(planner, None, plan)
    assert "not kept for later runs" in said[0]
