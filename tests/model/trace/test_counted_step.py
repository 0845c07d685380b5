import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.errors import TraceError
from lightning_mist.model import map_module, trace_model
from lightning_mist.model.fakes.fake_modules import isolated, substitute_parameters
from lightning_mist.model.trace.counted_step import StepCount, Subject, count_step, group, module_key, trained_beside
from lightning_mist.model.trace.part_hooks import loss_of


class Chain(nn.Module):
    """Two square linear blocks between a linear head and tail, without biases."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sigmoid()) for _ in range(2))
        self.outlet = nn.Linear(8, 1, bias=False)
        if frozen:
            self.inlet.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x).sum()


def count(module: Chain, *, fake: bool = True, twins: Any = (None, None), **how: bool) -> StepCount:
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    with isolated(module):
        parameters = substitute_parameters(module, mode, {})
        subject = Subject(
            module=module,
            blocks=tuple(module.blocks),
            parameters=parameters,
            mode=mode,
            call=module.training_step,
            context=nullcontext,
        )
        options = {"recompute": False, "gradients_exist": False, **how}
        return count_step(subject, torch.ones(10, 4), twins=twins, **options)


ROW = 10 * 8 * 4  # bytes of an activation
SQUARE = 8 * 8 * 4  # bytes of a block's weight


@pytest.mark.parametrize("fake", [True, False])
def test_parts_of_a_chain_by_hand(fake: bool) -> None:
    seen = count(Chain(), fake=fake)
    assert [p.flops for p in seen.forward] == [2 * 10 * 32, 2 * 10 * 64, 2 * 10 * 64, 2 * 10 * 8]
    # The batch needs no gradient, so the head's backward has one product; every other part has two.
    assert [p.flops for p in seen.backward] == [2 * 10 * 32, 4 * 10 * 64, 4 * 10 * 64, 4 * 10 * 8]
    assert [p.operators for p in seen.forward] == [1, 2, 2, 2]
    assert seen.saved == (ROW, ROW, ROW, 4)  # each block keeps its sigmoid; the tail the loss
    assert seen.made == (4 * 32, SQUARE, SQUARE, 4 * 8)
    # product and sigmoid
    assert [max(seen.forward_peaks(part)) for part in (1, 2)] == [2 * ROW, 2 * ROW]
    # Its result and the gradient of it, then that of the product; loss and its gradient live on. Then result and its
    # gradient are gone and the weight's gradient comes, then the gradient of what entered.
    assert seen.backward_peaks(1) == [8 + ROW, 8 + 2 * ROW, 8 + SQUARE, 8 + SQUARE + ROW]


def test_with_gradients_there_already_nothing_is_left_behind_and_one_addition_per_weight_comes_in() -> None:
    first, later = count(Chain()), count(Chain(), gradients_exist=True)
    assert later.made == (0, 0, 0, 0)
    assert [b.operators - a.operators for a, b in zip(first.backward, later.backward, strict=True)] == [1, 1, 1, 1]
    assert [p.flops for p in first.backward] == [p.flops for p in later.backward]


def test_a_recomputed_block_keeps_what_it_hands_on_and_runs_twice() -> None:
    plain, again = count(Chain()), count(Chain(), recompute=True)
    assert again.saved == (ROW, ROW, ROW, 4)  # sigmoid keeps its result, which is what the block hands on
    assert again.backward[1].flops == plain.backward[1].flops + plain.forward[1].flops
    # Only the gradient of its result is there at first; product and sigmoid are made again.
    assert again.backward_peaks(1)[:3] == [8, 8 + ROW, 8 + 2 * ROW]


def test_a_twin_counts_nothing_and_changes_nothing_for_the_others() -> None:
    whole, brief = count(Chain()), count(Chain(), twins=(None, 0))
    for part in (0, 1, 3):
        assert brief.forward[part].flops == whole.forward[part].flops
        assert brief.forward_peaks(part) == whole.forward_peaks(part)
        assert brief.saved[part] == whole.saved[part]
    assert brief.forward[2].flops == brief.backward[2].flops == 0
    assert brief.backward_peaks(1) == whole.backward_peaks(1)


def test_where_no_gradient_flows_there_is_no_backward() -> None:
    seen = count(Chain(frozen=True))
    assert [p.flops > 0 for p in seen.backward] == [False, False, True, True]
    assert seen.backward_peaks(0) == []


def test_python_does_not_collect_during_a_step_and_does_again_afterwards() -> None:
    states = []

    class Watching(Chain):
        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            states.append(gc.isenabled())
            return super().training_step(x)

    assert gc.isenabled()
    count(Watching())
    assert states == [False]
    assert gc.isenabled()


def test_losses_come_bare_or_in_a_mapping() -> None:
    loss = torch.ones((), requires_grad=True)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "logits": 1}) is loss
    for value in (None, {"logits": loss}, 3.0):
        with pytest.raises(TraceError, match="without a loss"):
            loss_of(value)
    with pytest.raises(TraceError, match="does not depend on any trained parameter"):
        loss_of(torch.ones(()))


def test_a_step_that_leaves_out_a_block_is_refused() -> None:
    class Dropping(Chain):
        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.outlet(self.blocks[1](self.inlet(x))).sum()

    with pytest.raises(TraceError, match="called blocks 1 times, but has 2 of them"):
        count(Dropping())


def test_equal_keys_are_one_kind_and_labels_are_unique() -> None:
    kinds = group(["Block", "Block", "Cross", "Block", "Cross"], ["a", "b", "c", "a", "c"])
    assert kinds.labels == ("Block", "Block#2", "Cross")
    assert kinds.examples == (0, 1, 2)
    assert kinds.of == (0, 1, 2, 0, 2)
    assert kinds.members(0) == (0, 3)


def test_no_blocks_have_no_kinds() -> None:
    assert group((), ()).twins() == ()


def test_blocks_are_told_apart_by_class_shapes_and_what_is_trained() -> None:
    frozen = nn.Linear(2, 3)
    frozen.weight.requires_grad = False
    keys = {
        module_key(nn.Linear(2, 3)),
        module_key(nn.Linear(3, 2)),
        module_key(nn.Linear(2, 3).double()),
        module_key(frozen),
        module_key(nn.Linear(2, 3).eval()),
        module_key(nn.Sequential(nn.Linear(2, 3))),
    }
    assert len(keys) == 6
    assert module_key(nn.Linear(2, 3)) == module_key(nn.Linear(2, 3))


def test_what_stands_beside_an_example_may_run_itself_and_so_does_the_last():
    assert group("AAAAAA", [1] * 6).twins() == (None, 0, 0, 0, 0, 0)
    assert group("AAAAAA", [1] * 6).twins(surrounded=True) == (None, None, 0, 0, 0, None)
    kinds = group("AAAAABAAA", [1, 1, 1, 1, 1, 2, 1, 1, 1])
    assert kinds.twins(surrounded=True) == (None, None, 0, 0, None, None, None, 0, None)


def test_head_examples_and_tail_stand_for_all_parts():
    kinds = group(["A", "A", "B", "A"], [1, 1, 2, 1])
    head, one, other, tail = kinds.parts(["h.0", "h.1", "h.2", "h.3"])
    assert (head.part, head.label, head.block, head.follower) == (0, "head", "", None)
    assert (one.part, one.label, one.block, one.follower) == (1, "A", "h.0", 2)
    assert (other.part, other.label, other.block, other.follower) == (3, "B", "h.2", None)
    assert (tail.part, tail.label) == (5, "tail")
    assert [part.part for part in group((), ()).parts(())] == [0, 1]


class Beside(nn.Module):
    """Blocks that are frozen, each with a trained adapter that stands apart from it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False) for _ in range(5)
        )
        self.adapters = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            batch = block(batch) + adapter(batch)
        return batch.square().mean()


def test_adapters_apart_from_their_blocks_get_their_own_gradients():
    module, batch = Beside(), torch.randn(4, 8)

    def step(item: torch.Tensor) -> torch.Tensor:
        return module.training_step(item, 0)

    found = map_module(module, step, batch, second_batch=batch[:3])
    assert trained_beside(found)[:-1] == [(f"adapters.{i}.weight",) for i in range(4)]
    spec = trace_model(module, batch, module_map=found)
    made = {
        allocation.parameter
        for layer in (*spec.layers, spec.tail)
        for allocation in layer.events.first.backward
        if allocation.parameter.startswith("adapters")
    }
    assert made == {f"adapters.{i}.weight" for i in range(5)}


class Upcast(nn.Module):
    """Keeps a copy of what it is given, in another type, and not itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden.float()).relu().bfloat16() + hidden


class Upcasting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Upcast() for _ in range(4))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        hidden = batch.bfloat16() * 2
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.float().square().mean()


def test_the_last_block_is_a_kind_of_its_own_where_its_input_outlives_it():
    spec = trace_model(Upcasting(), torch.randn(4, 8), optimizer=torch.optim.SGD)
    assert spec.notes == ()
    assert spec.kinds.count(spec.kinds[-1]) == 1
    assert all(layer.events is not None for layer in (spec.head, *spec.layers, spec.tail))
