import torch
from torch import nn

from lightning_mist.model import map_module, trace_model
from lightning_mist.model.trace.block_kinds import group, module_key, trained_beside


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
