"""Planning asks how much room there is, and tries again with less where that was wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_mist.errors import TraceError
from lightning_mist.model.initialization import empty_out
from lightning_mist.plan import ModuleMap
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.cutting.rules import Site
from lightning_mist.strategy.planning import planning_state as planner_module
from lightning_mist.strategy.planning.memory_budget import (
    Room,
    everywhere_unless_out_of_memory,
    is_out_of_memory,
    unless_out_of_memory,
)
from lightning_mist.strategy.planning.planning_state import FitPlanner
from lightning_mist.tuner import SearchSpace
from tests.plans import plan_of

CPU, CUT = torch.device("cpu"), plan_of(4, 2, {"data": 1})


def room(held, limit, step):
    return Room(held=held, limit=limit, step_bytes=lambda: step)


@pytest.mark.parametrize(
    ("held", "step", "is_crowded"),
    [(100, 700, False), (100, 801, True), (60, 10**9, True), (400, None, True), (300, None, False)],
)
def test_gradients_are_compared_where_twice_the_parameters_and_a_step_fit(held, step, is_crowded):
    assert room(held, 1000, step).is_crowded() == is_crowded


def test_small_modules_are_not_counted():
    def count():
        raise AssertionError

    assert not Room(held=50, limit=1000, step_bytes=count).is_crowded()


def test_microbatches_are_timed_that_fit_beside_the_parameters():
    assert room(400, 1000, 800).fitting([1, 2, 6, 8]) == [1, 2, 6]
    assert room(999, 1000, 800).fitting([2, 8]) == [2]
    assert room(999, 1000, None).fitting([2, 8]) == [2, 8]


def test_running_out_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert not is_out_of_memory(RuntimeError("shapes"))
    with pytest.raises(TraceError) as caught:
        raise TraceError("trying it failed") from torch.OutOfMemoryError("2 GiB")
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(TraceError("no"))
    assert not is_out_of_memory(None)


def failing(error):
    def work():
        raise error

    return work


def test_memory_that_ran_out_is_no_error():
    assert unless_out_of_memory(lambda: 3, CPU) == 3
    assert unless_out_of_memory(failing(MemoryError()), CPU) is None
    with pytest.raises(TraceError, match="another"):
        unless_out_of_memory(failing(TraceError("another")), CPU)


@pytest.mark.usefixtures("single_rank")
def test_it_is_asked_of_all_ranks():
    assert everywhere_unless_out_of_memory(lambda: 3, CPU) == 3
    assert everywhere_unless_out_of_memory(failing(torch.OutOfMemoryError("")), CPU) is None
    with pytest.raises(TraceError, match="another"):
        everywhere_unless_out_of_memory(failing(TraceError("another")), CPU)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])


def planner_for(module, *, is_crowded):
    said = []
    found = ModuleMap(step="", blocks=tuple(f"blocks.{i}" for i in range(3)), cuts=(), parameters=())
    planner = FitPlanner(
        trainer=None,
        strategy=SimpleNamespace(lightning_module=module, root_device=CPU),
        request=SimpleNamespace(memory_limit=None, search=SearchSpace()),
        progress=SimpleNamespace(say=said.append),
        plain=None,
        batch=None,
        call=SimpleNamespace(around=lambda work: work, clock=None),
        initial=None,
        cluster=SimpleNamespace(kind="cpu", parts=[SimpleNamespace(device=SimpleNamespace(memory_bytes=2000))]),
    )
    planner.step_bytes.append(10**9 if is_crowded else 0)
    return planner, found, said


@pytest.mark.usefixtures("single_rank")
class TestProof:
    """One that needs too much memory, with all parameters or always."""

    @pytest.fixture
    def seen(self, monkeypatch):
        """How many parameters there were, at each try; ``least`` of them fit."""
        tries = SimpleNamespace(found=[], least=0)

        def prove(module, *_):
            tries.found.append(len(list(module.parameters())))
            if tries.found[-1] > tries.least:
                raise torch.OutOfMemoryError("out of memory")
            return "sums over rows"

        monkeypatch.setattr(planner_module, "prove_here", prove)
        monkeypatch.setattr(planner_module, "tried", lambda work, *_, **__: work())
        return tries

    @pytest.mark.parametrize(("is_crowded", "tries"), [(False, [6, 2]), (True, [2])])
    def test_layers_share_their_parameters(self, seen, is_crowded, tries):
        module, seen.least = Net(), 2
        before = dict(module.named_parameters())
        planner, found, said = planner_for(module, is_crowded=is_crowded)
        excluded = planner.with_invariance(found, CUT)
        assert seen.found == tries
        assert excluded.excludes("microbatches") == ("sums over rows",)
        assert all(module.get_parameter(name) is parameter for name, parameter in before.items())
        assert any("no room" in line for line in said) != is_crowded

    def test_without_any_room_batches_are_not_cut(self, seen):
        planner, found, _ = planner_for(Net(), is_crowded=False)
        assert "no room to prove" in planner.with_invariance(found, CUT).excludes("microbatches")[0]
        assert seen.found == [6, 2]


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    ("answers", "microbatches", "asked", "excluded"),
    [
        ({0: "shifts", 1: CutRules(lap=1)}, 1, [0, 1], []),
        ({0: CutRules(lap=0), None: "it pools rows"}, 2, [0, None], ["microbatches"]),
        ({0: CutRules(lap=0), None: CutRules()}, 2, [0, None], []),
        ({0: "it pools", 1: "it pools", None: CutRules()}, 1, [0, 1, None], ["tail_tokens"]),
        ({0: "it pools", 1: "it pools", None: CutRules(whole_tail="drops")}, 1, [0, 1, None],
         ["tail_tokens", "tail_chunks"]),
        ({0: CutRules(lap=0), None: CutRules(sites=(Site(key=("sum",), patches=(), line=""),))}, 2, [0, None],
         ["tail_tokens"]),
    ],
)  # fmt: skip
def test_chunks_are_of_tokens_where_that_is_proved(monkeypatch, answers, microbatches, asked, excluded):
    tries = []

    def prove(module, blocks, call, batch, lap, rows):
        tries.append(lap)
        return answers[lap]

    monkeypatch.setattr(planner_module, "prove_here", prove)
    monkeypatch.setattr(planner_module, "tried", lambda work, *_, **__: work())
    planner, found, _ = planner_for(Net(), is_crowded=False)
    plan = plan_of(4, microbatches, {"data": 1, "layers": 3, "tail": 2})
    proved = planner.with_invariance(replace(found, tokens=8), plan)
    assert tries == asked
    assert [item.feature for item in proved.exclusions] == excluded
    assert (proved.lap is None) == ("tail_tokens" in excluded)
    assert (planner.rules.tokens is None) == (proved.lap is None)


def test_ranks_whose_batches_have_no_rows_ask_the_others_all_the_same(monkeypatch):
    planner, found, _ = planner_for(Net(), is_crowded=False)
    asked = []
    monkeypatch.setattr(planner_module, "of_all_ranks", lambda value: asked.append(value) or [4, value])
    assert planner.seconds(found) == ()
    assert asked == [None]


def test_parameters_without_values_take_no_room():
    module = Net()
    planner, *_ = planner_for(module, is_crowded=False)
    assert planner.room.held == sum(p.nbytes for p in module.parameters())
    for parameter in module.blocks.parameters():
        empty_out(parameter)
    assert planner.room.held == 0
