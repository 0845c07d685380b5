import torch

from lightning_mist.plan import SequenceSplit
from lightning_mist.tensor_parallel import (
    CountingGroup,
    Layout,
    SplitContext,
    SplitTensor,
    enter_sequence,
    from_local_sequence,
    layout_of,
    run_ranks,
    split_sequence,
    whole,
)
from tests.tensor_parallel.rules import check, tensor

ENTRY = SequenceSplit(position=0, leaf=1, dim=1)


def test_hidden_states_enter_in_parts():
    def rank(group):
        context = SplitContext(group, True)
        states = torch.arange(12.0).reshape(1, 6, 2)
        args, kwargs = enter_sequence((3, states), {"mask": states}, ENTRY, context)
        assert args[0] == 3
        assert kwargs["mask"] is states
        assert layout_of(args[1]) == Layout((1, 6, 2), 1)
        again, _ = enter_sequence(args, kwargs, ENTRY, context)
        assert again[1] is args[1]
        assert torch.equal(whole(args[1]), states)
        return args[1].local

    assert torch.equal(torch.cat(run_ranks(2, rank), 1), torch.arange(12.0).reshape(1, 6, 2))


def test_what_is_left_whole():
    context = SplitContext(CountingGroup(2))
    states = torch.ones(1, 6, 2)
    assert enter_sequence((3, states), {}, ENTRY, context)[0][1] is states  # not sequence parallel
    context = SplitContext(CountingGroup(2), True)
    for value in (torch.ones(1, 7, 2), torch.ones(6), None):
        assert enter_sequence((3, value), {}, ENTRY, context)[0][1] is value


def test_parts_that_are_here_already():
    def rank(group):
        shown = from_local_sequence(torch.full((2, 3), group.rank), -1, SplitContext(group, True))
        assert isinstance(shown, SplitTensor)
        assert shown.shape == (2, 6)
        return whole(shown)

    assert run_ranks(2, rank)[0].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


def test_gradients_of_what_was_split_and_split_again():
    def function(x):
        if not isinstance(x, SplitTensor):
            return x * x
        return split_sequence(x, 1, x.context) * x

    check(function, (tensor(2, 8, 4), 1), results=(1,))
    check(function, (tensor(2, 8, 4), 2), gathers=("relayout",), results=(1,))
