import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_mist.model.fakes.trial_values import (
    WithoutDropout,
    convert_plain_tensors,
    filled,
    kept_slots,
    put,
    slots_of,
    thin,
)

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
    with kept_slots(block):
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
