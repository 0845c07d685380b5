import logging
from collections import UserDict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from lightning_mist.model.fakes.fake_modules import (
    WithoutDropout,
    address_of,
    convert_plain_tensors,
    fake_like,
    fake_parameters,
    filled,
    isolated,
    put,
    quiet_fakes,
    resize_batch,
    slots_of,
    state_of,
    storage_of,
    substitute_parameters,
    thin,
)
from lightning_mist.model.spec.polynomial import BILINEAR, CONSTANT, QUADRATIC
from lightning_mist.model.trace.tracing import bases, sized
from lightning_mist.model.user_code import unchanged
from lightning_mist.recomputation import OwnFunction, users_checkpoints
from lightning_mist.tensors import batch_rows, batch_tensors, sequence_length
from lightning_mist.without_values import become


def mode():
    return FakeTensorMode(allow_non_fake_inputs=True)


def test_every_slot_has_its_own_fake_of_the_same_form():
    module = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3, bias=False), "c": nn.GRU(2, 3)})
    module.b.weight = module.a.weight
    module.a.weight.data = torch.randn(2, 3).t()
    module.c.bias_ih_l0.data = torch.zeros(()).expand(9)
    module.a.bias.requires_grad_(False)
    slots = fake_parameters(module, mode())
    fakes = {slot: child._parameters[slot[1]] for slot in slots.values() for child in [module.get_submodule(slot[0])]}
    assert len(fakes) == 3 + 4
    assert all(isinstance(fake, nn.Parameter) and isinstance(fake, FakeTensor) for fake in fakes.values())
    assert fakes["a", "weight"] is not fakes["b", "weight"]
    assert fakes["a", "weight"].stride() == (1, 3)
    assert fakes["c", "bias_ih_l0"].stride() == (1,)
    assert not fakes["a", "bias"].requires_grad
    assert all(isinstance(weight, FakeTensor) for weight in module.c._flat_weights)
    assert all(slots[id(fake)] == slot for slot, fake in fakes.items())


def test_a_tensor_becomes_a_fake_and_itself_again():
    fakes = mode()
    with fakes:
        source = torch.empty(2)
    target = torch.ones(2)
    fake = fake_like(target, source.fake_mode)
    become(target, fake)
    assert isinstance(target, FakeTensor)
    become(target, fake)
    assert type(target) is torch.Tensor
    assert target.sum() == 2


def test_identities():
    x = torch.ones(3)
    with mode():
        fake = torch.empty(3)
    assert address_of(x[1:]) == address_of(x) != 0
    assert address_of(fake) == address_of(x.to_sparse()) == 0
    assert storage_of(x[1:]) == storage_of(x)
    assert storage_of(fake[1:]) == storage_of(fake) != storage_of(fake + 1)
    before = state_of(x)
    assert state_of(x) == before
    x.add_(1)
    assert state_of(x) != before
    assert state_of(3) == state_of(3)


def test_failures_on_fakes_are_not_logged(caplog):
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with mode():
        a, b = torch.empty(2, 3), torch.empty(2, 3)
    with quiet_fakes(), pytest.raises(RuntimeError, match="must have same reduction dim"):
        a @ b
    assert not caplog.records
    assert not log.disabled


Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    ids: torch.Tensor
    names: list[str]


def ids(rows: int = 2, length: int = 8) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


def test_rows_repeat_and_positions_are_thinned_out_from_end_to_end() -> None:
    batch = resize_batch({"ids": ids(), "scale": torch.tensor(2.0)}, 3, 4)
    assert batch["ids"].tolist() == [[0, 2, 4, 7], [8, 10, 12, 15], [0, 2, 4, 7]]
    assert batch["scale"].item() == 2.0


def test_padding_at_either_end_stays_in_a_shorter_batch() -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :2] = 0
    mask[1, -2:] = 0
    for length in (3, 6, 9):
        shorter = resize_batch({"mask": mask}, 2, length)["mask"]
        assert shorter.shape == (2, length)
        assert shorter[0, 0] == 0
        assert shorter[1, -1] == 0


def test_masks_of_two_positions_are_thinned_in_both() -> None:
    batch = resize_batch((ids(), torch.ones(2, 1, 8, 8)), 2, 4)
    assert batch[1].shape == (2, 1, 4, 4)


@pytest.mark.parametrize(
    "batch",
    [
        [ids(), ids()],
        Pair(ids(), ids()),
        {"a": {"b": ids()}},
        UserDict(a=ids()),
        Record(ids=ids(), names=["one", "two"]),
    ],
    ids=["list", "named tuple", "nested", "mapping", "dataclass"],
)
def test_containers_keep_their_type(batch: Any) -> None:
    resized = resize_batch(batch, 4, 4)
    assert type(resized) is type(batch)
    assert all(tensor.shape == (4, 4) for tensor in batch_tensors(resized))
    if isinstance(resized, Record):
        assert resized.names == ["one", "two", "one", "two"]


def test_length_is_told_only_where_tensors_agree() -> None:
    assert sequence_length({"ids": ids(), "labels": torch.zeros(2)}) == 8
    assert sequence_length((ids(2, 8), ids(2, 9))) is None
    assert sequence_length(torch.ones(2, 8)) is None  # numbers are no tokens
    with pytest.raises(ValueError, match="rows of a batch"):
        resize_batch((torch.ones(3), torch.ones(4)), 2, None)


def test_arrays_and_lists_of_one_value_per_row_are_resized_as_tensors_are() -> None:
    batch = {"ids": ids(), "array": np.arange(16).reshape(2, 8), "text": ("a", "b"), "about": [{"id": 1}, {"id": 2}]}
    resized = resize_batch(batch, 3, 4)
    assert resized["array"].tolist() == resized["ids"].tolist()
    assert resized["text"] == ("a", "b", "a")
    assert resized["about"] == [{"id": 1}, {"id": 2}, {"id": 1}]


@pytest.mark.parametrize(
    "batch",
    [{"x": ids(), "graph": object()}, {"x": ids(), "s": ids().to_sparse()}, (ids(), [{"x": ids()}, {"x": ids()}])],
    ids=["unknown class", "layout", "ambiguous list"],
)
def test_batches_that_the_runtime_would_not_cut_are_counted_as_they_are(batch: Any) -> None:
    assert batch_rows(batch) is None
    with pytest.raises(ValueError, match="must share dimension 0"):
        resize_batch(batch, 2, None)
    assert [basis.powers for basis in bases(batch, real=False)] == [CONSTANT]


def test_sizes_to_try_go_from_sequences_to_rows_to_nothing() -> None:
    assert [basis.powers for basis in bases(ids(2, 8), real=False)] == [BILINEAR, QUADRATIC, CONSTANT]
    assert [basis.powers for basis in bases(torch.ones(2, 8), real=False)] == [QUADRATIC, CONSTANT]
    assert [basis.powers for basis in bases((torch.ones(2), torch.ones(3)), real=False)] == [CONSTANT]
    first = next(bases(ids(2, 4096), real=True))
    assert max(s for _, s in first.sizes) == 64
    batch = sized(ids(2, 8), next(bases(ids(2, 8), real=False)), (6, 6), None)
    assert batch.shape == (6, 6)


CPU = torch.device("cpu")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_every_slot_of_a_shared_parameter_is_found():
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    block[1].weight = block[0].weight
    found = slots_of(block)
    assert set(found) == {"0.weight", "0.bias", "1.bias"}
    assert found["0.weight"] == (block[0].weight, ((block[0], "weight"), (block[1], "weight")))
    value = torch.ones(3, 3)
    put(found["0.weight"][1], value)
    assert block[0].weight is value
    assert block[1].weight is value


def test_a_thin_stand_in_takes_one_row():
    made = thin(torch.empty(1000, 16, device="meta"), torch.float64, generator())
    assert made.shape == (1000, 16)
    assert made.untyped_storage().nbytes() == 16 * 8


def test_values_are_near_the_parameters_own_and_never_all_zero():
    parameter = nn.Parameter(torch.zeros(8, 8))
    made = filled(parameter, torch.float64, generator())
    assert made.dtype == torch.float64
    assert made.any()
    assert made.abs().max() < 0.2
    assert not parameter.any()


def test_a_hollow_matrix_gets_random_rows_that_differ():
    made = filled(torch.empty(64, 64, device="meta"), torch.float32, generator())
    assert torch.linalg.matrix_rank(made) == 64
    assert made.std() == pytest.approx(64**-0.5, rel=0.1)


def test_integer_parameters_keep_their_values():
    parameter = nn.Parameter(torch.arange(4), requires_grad=False)
    assert torch.equal(filled(parameter, torch.float64, generator()), torch.arange(4))


def test_slots_buffers_and_attributes_come_back():
    block = nn.BatchNorm1d(4)
    block.table = torch.ones(3)
    block.where = torch.device("meta")
    before = {**vars(block), **block._parameters, **block._buffers}
    with unchanged(block):
        convert_plain_tensors(block, torch.float64, CPU)
        put(((block, "weight"),), torch.zeros(4))
        assert block.running_mean.dtype == block.table.dtype == torch.float64
        assert block.num_batches_tracked.dtype == torch.int64
        assert block.where == CPU
        del block.table
    after = {**vars(block), **block._parameters, **block._buffers}
    assert all(after[name] is value for name, value in before.items())
    assert after.keys() == before.keys()


def test_nothing_is_dropped_and_the_coarsest_type_is_noted():
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    with WithoutDropout() as mode:
        assert F.dropout(x, 0.9) is x
        y = F.scaled_dot_product_attention(x, x, x, None, 0.9)
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x, dropout_p=0.9), y)
        attention = nn.MultiheadAttention(8, 2, dropout=0.9, dtype=torch.float64)
        torch.testing.assert_close(attention(x[0], x[0], x[0]), attention(x[0], x[0], x[0]))
        assert mode.coarsest == torch.float64
        x.float()
    torch.testing.assert_close(y, F.scaled_dot_product_attention(x, x, x))
    assert mode.coarsest == torch.float32


# Running a step without leaving a trace in the module.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[int] = []


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_put_back_even_after_an_error(fails: bool) -> None:
    module = Tied()
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    mean = module.norm.running_mean.clone()
    state = torch.get_rng_state()

    def change() -> None:
        with isolated(module):
            substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
            module.seen.append(1)
            module.new = 3
            module.norm.running_mean.add_(1)
            module.norm.training = False
            torch.rand(3)
            if fails:
                raise KeyError("inside")

    if fails:
        with pytest.raises(KeyError):
            change()
    else:
        change()
    assert {name: id(p) for name, p in module.named_parameters()} == {name: i for name, (i, _) in before.items()}
    assert module.second.weight is module.first.weight
    assert not hasattr(module, "new")
    assert (module.seen, module.norm.training) == ([], True)
    assert torch.equal(module.norm.running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_slots_of_one_parameter_share_a_stand_in_unless_others_use_them() -> None:
    module = Tied()
    with isolated(module):
        made = substitute_parameters(module, None, {})
        assert module.first.weight is module.second.weight
        assert any(module.first.weight is one for one in made)
    with isolated(module):
        substitute_parameters(module, None, {("first", "weight"): (0,), ("second", "weight"): (1,)})
        assert module.first.weight is not module.second.weight


def test_real_stand_ins_share_values_and_not_gradients() -> None:
    module = Tied()
    with isolated(module):
        substitute_parameters(module, None, {})
        module.first(torch.ones(1, 3)).sum().backward()
        assert module.first.weight.grad is not None
        pointer = module.first.weight.data_ptr()
    assert module.first.weight.data_ptr() == pointer
    assert module.first.weight.grad is None


def test_parameters_without_memory_of_their_own_and_on_meta_get_fakes_of_full_size() -> None:
    hollow = nn.Linear(3, 5)
    hollow.weight.data = torch.zeros(()).expand(5, 3)
    absent = nn.BatchNorm1d(4, device="meta")
    for module, name in ((hollow, "weight"), (absent, "running_mean")):
        with isolated(module):
            substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
            tensor = getattr(module, name)
            assert isinstance(tensor.data, FakeTensor)
            assert tensor.device.type == "cpu"
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4


def test_recurrent_modules_use_their_stand_ins() -> None:
    module = nn.LSTM(3, 4)
    with isolated(module):
        substitute_parameters(module, FakeTensorMode(allow_non_fake_inputs=True), {})
        assert isinstance(module(torch.ones(2, 1, 3))[0], FakeTensor)
    assert not isinstance(module(torch.ones(2, 1, 3))[0], FakeTensor)


def test_only_our_own_checkpoints_recompute_inside() -> None:
    runs = []

    def square(x: torch.Tensor) -> torch.Tensor:
        runs.append(torch.is_grad_enabled())
        return x.sin() ** 2

    def times(function: object, *, reentrant: bool = False) -> int:
        runs.clear()
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
        return len(runs)

    with isolated(nn.Linear(1, 1)):
        assert times(square) == 1
        assert times(square, reentrant=True) == 1
        assert times(OwnFunction(square)) == 2
    assert times(square) == 2
    assert times(square, reentrant=True) == 2


def test_behind_the_blocks_users_recompute_and_in_what_they_repeat() -> None:
    runs, entered = [], []

    def inner(x: torch.Tensor) -> torch.Tensor:
        runs.append("inner")
        return x.sin() ** 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        runs.append("outer")
        return torch.utils.checkpoint.checkpoint(inner, x.exp(), use_reentrant=False)

    @contextmanager
    def repeating() -> Iterator[None]:
        entered.append(len(runs))
        yield

    def train(*, reentrant: bool = False) -> tuple[torch.Tensor, list[str]]:
        runs.clear()
        x = torch.ones(3, requires_grad=True)
        torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        return x.grad, list(runs)

    plain = train()
    for reentrant in (False, True):
        with isolated(nn.Linear(1, 1)), users_checkpoints(repeating):
            gradient, found = train(reentrant=reentrant)
        assert torch.equal(gradient, plain[0])
        assert found == plain[1]
        assert entered.pop(0) == 2
        entered.clear()
