import torch

from lightning_mist.tensor_parallel import CountingGroup, SplitContext
from lightning_mist.tensor_parallel.shard_layout import Layout


def context_of(sequence_parallel=False):
    return SplitContext(CountingGroup(2), sequence_parallel)


def test_one_copy_for_consecutive_uses_of_one_value():
    context, x = context_of(), torch.ones(2, 4, requires_grad=True) * 1
    first = context.copy_in(x)
    assert first is not x
    assert context.copy_in(x) is first
    context.copy_in(x * 2)
    assert context.copy_in(x) is not first


def test_a_value_that_was_written_into_is_copied_again():
    context, x = context_of(), torch.ones(2, 4, requires_grad=True) * 1
    first = context.copy_in(x)
    x.data.add_(1)
    x.mul_(1)
    assert context.copy_in(x) is not first


def test_values_without_gradient_are_no_copies():
    context, x = context_of(), torch.ones(2)
    assert context.copy_in(x) is x


def test_nothing_is_kept_behind_a_sum():
    context, x = context_of(), torch.ones(2, 4, requires_grad=True) * 1
    first = context.copy_in(x)
    total, layout = context.reduce(torch.ones(2, 4))
    assert layout is None
    assert total.shape == (2, 4)
    assert context.copy_in(x) is not first
    first = context.copy_in(x)
    context.forget()
    assert context.copy_in(x) is not first


def test_sums_go_to_parts_of_sequences_that_are_known():
    context = context_of(sequence_parallel=True)
    before = context.sequence
    total, layout = context.reduce(torch.ones(2, 6, 4))
    assert layout is None
    assert context.sequence_layout((2, 6, 4), 1) == Layout((2, 6, 4), 1)
    total, layout = context.reduce(torch.ones(2, 6, 9))
    assert layout == Layout((2, 6, 9), 1)
    assert total.shape == (2, 3, 9)
    key = object()
    flat = Layout((12, 4), 0, 2)
    assert context.gather_input(key, torch.ones(6, 4), flat).shape == (12, 4)
    assert context.reduce(torch.ones(12, 9))[1] == Layout((12, 9), 0, 2)
    assert not before  # what was known earlier is not changed
    context.sequence = before
    assert context.reduce(torch.ones(12, 9))[1] is None


def test_sequences_that_do_not_divide():
    context = context_of(sequence_parallel=True)
    assert context.sequence_layout((2, 7, 4), 1) is None
    assert context.sequence_layout((2, 7, 4), -1) is None
    assert not context.sequence
