import torch

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import SplitContext, present, run_ranks
from lightning_mist.tensor_parallel.parts import bind, operand, part_along, relayout
from lightning_mist.tensor_parallel.shard_layout import Layout

FULL = torch.arange(24.0).reshape(6, 4)
ROWS = ParameterSplit(name="weight", dim=0, factors=((6, True),))


def on_two_ranks(function):
    def as_rank(group):
        context = SplitContext(group)
        start = 3 * group.rank
        return function(context, present(FULL[start : start + 3].clone(), ROWS, context)), context.gathered

    return run_ranks(2, as_rank)


def test_an_operand_is_the_part_that_meets_the_target():
    target = Layout((6, 4), 0, 1)
    for rank, (parts, gathered) in enumerate(
        on_two_ranks(
            lambda context, tensor: [operand(context, value, target) for value in (tensor, FULL, FULL[:1], 2.0)]
        )
    ):
        mine = FULL[3 * rank : 3 * rank + 3]
        assert torch.equal(parts[0], mine)
        assert torch.equal(parts[1], mine)
        assert torch.equal(parts[2], FULL[:1])
        assert parts[3] == 2.0
        assert not gathered


def test_an_operand_shared_out_in_another_way_is_gathered_and_counted():
    for rank, (part, gathered) in enumerate(
        on_two_ranks(lambda context, tensor: operand(context, tensor, Layout((6, 4), 1, 1)))
    ):
        assert torch.equal(part, FULL[:, 2 * rank : 2 * rank + 2])
        assert gathered["relayout"] == 1


def test_parts_along_a_dimension_whatever_way_a_value_is_held():
    for rank, ((same, other, plain), gathered) in enumerate(
        on_two_ranks(
            lambda context, tensor: (
                part_along(context, tensor, 0, 1),
                part_along(context, tensor, -1, 2),
                part_along(context, FULL, 0, 1),
            )
        )
    ):
        assert torch.equal(same, FULL[3 * rank : 3 * rank + 3])
        assert torch.equal(other, FULL[:, rank::2])
        assert torch.equal(plain, same)
        assert gathered["relayout"] == 1


def test_the_whole_of_another_layout_is_counted():
    for value, gathered in on_two_ranks(relayout):
        assert torch.equal(value, FULL)
        assert gathered["relayout"] == 1


def test_arguments_by_name():
    assert bind(("a", "b"), (1,), {"c": 3}, b=2) == {"a": 1, "b": 2, "c": 3}
