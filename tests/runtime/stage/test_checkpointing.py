import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

from lightning_mist.plan import ParameterSplit, SequenceSplit, TensorSplit
from lightning_mist.runtime.stage.checkpointing import checkpoint_block, neutral_checkpointing
from lightning_mist.runtime.stage.stage_split import StageSplit
from lightning_mist.tensor_parallel import present, run_ranks, shard
from lightning_mist.tensor_parallel import whole as gather


class Counted:
    def __init__(self):
        self.calls = 0

    def __call__(self, x, *, scale, mask=None):
        self.calls += 1
        return {"y": torch.nn.functional.dropout(torch.tanh(x * scale), 0.5) * x, "mask": mask}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_users_checkpoints_do_nothing_inside_and_work_again_afterwards(use_reentrant):
    x, block = torch.ones(3, requires_grad=True), Counted()
    run = [lambda value: block(value, scale=2.0)["y"]][0]
    names = torch.utils.checkpoint._checkpoint_without_reentrant_generator, torch.utils.checkpoint.CheckpointFunction
    with neutral_checkpointing():
        inside = checkpoint(run, x, use_reentrant=use_reentrant)
    inside.sum().backward()
    assert block.calls == 1
    assert names == (
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.utils.checkpoint.CheckpointFunction,
    )
    checkpoint(run, x, use_reentrant=use_reentrant).sum().backward()
    assert block.calls == 3


@pytest.mark.parametrize("within", [True, False])
def test_a_block_runs_twice_with_the_same_random_numbers(within):
    def gradient(run):
        torch.manual_seed(0)
        x = torch.linspace(0.1, 1, 50, requires_grad=True)
        run(x)["y"].sum().backward()
        return x.grad

    block = Counted()

    def checkpointed(x):
        if within:
            with neutral_checkpointing():
                return checkpoint_block(block, (x,), {"scale": 2.0, "mask": [None, x]})
        return checkpoint_block(block, (x,), {"scale": 2.0})

    found = gradient(checkpointed)
    assert block.calls == 2
    assert torch.equal(found, gradient(lambda x: block(x, scale=2.0)))


def test_checkpoints_inside_a_block_are_neutral_in_recomputation_too():
    inner = Counted()

    def block(x):
        return checkpoint(lambda value: inner(value, scale=2.0)["y"], x, use_reentrant=False)

    x = torch.ones(3, requires_grad=True)
    with neutral_checkpointing():
        y = checkpoint_block(block, (x,), {})
    y.sum().backward()
    assert inner.calls == 2


def test_split_arguments_are_kept_as_parts_and_recomputed_with_their_own_sequence():
    whole = torch.linspace(0.1, 1.0, 16, dtype=torch.float64).reshape(2, 4, 2)
    weight = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64).reshape(2, 2)
    split = ParameterSplit(name="w", dim=1, factors=((2, True),))

    def gradient(group, *, checkpointed):
        stage = StageSplit(
            TensorSplit(degree=2, parameters=(), sequence=(SequenceSplit(position=0, leaf=0, dim=1),)),
            group,
            sequence_parallel=True,
        )
        x, local = whole.clone().requires_grad_(), shard(weight, split, group.rank, 2).requires_grad_()
        shown = present(local, split, stage.context)

        def block(states):
            return torch.nn.functional.linear(torch.nn.functional.gelu(states), shown)

        with stage.running({}):
            args, kwargs = stage.enter_block(0, (x,), {})
            output = checkpoint_block(block, args, kwargs, stage) if checkpointed else block(*args)
        # Another microbatch has come since.
        stage.enter_block(0, (torch.ones(2, 6, 2),), {})
        gather(output).square().sum().backward()
        return x.grad, local.grad

    for found, expected in zip(
        run_ranks(2, lambda group: gradient(group, checkpointed=True)),
        run_ranks(2, lambda group: gradient(group, checkpointed=False)),
        strict=True,
    ):
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.equal(mine, wanted)
