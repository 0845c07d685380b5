import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_mist.plan import LiveTensor, ModuleMap, ParameterSplit, ParameterUse, SequenceSplit, TensorSplit
from lightning_mist.recomputation import neutral_checkpointing
from lightning_mist.runtime.stage.stage_split import StageSplit, checkpoint_block
from lightning_mist.tensor_parallel import Layout, SplitTensor, present, run_ranks, shard
from lightning_mist.tensor_parallel import whole as gather

HIDDEN = LiveTensor(key="h", shape=(2, 6, 4), dtype="float32", requires_grad=True, batch_dim=0, sequence_dim=1)


def split_of(group, *, sequence_parallel=False):
    return StageSplit(
        TensorSplit(
            degree=group.size,
            parameters=(ParameterSplit(name="a.weight", dim=0, factors=((4, True),)),),
            sequence=(SequenceSplit(position=3, leaf=0, dim=1),),
        ),
        group,
        sequence_parallel=sequence_parallel,
    )


def use(name, *slots):
    return ParameterUse(
        name=name, slots=tuple((*slot, (0,)) for slot in slots), shape=(4, 4), dtype="float32", requires_grad=True
    )


def test_slots_show_the_whole_shape_inside_and_hold_the_part_again_afterwards():
    def run(group):
        module = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        module["tied"] = nn.Module()
        module["tied"].weight = module["a"].weight
        part = module["a"].weight
        part.data = part.data[:2].clone()
        module_map = ModuleMap(
            step="training_step", blocks=(), cuts=(),
            parameters=(use("a.weight", ("a", "weight"), ("tied", "weight")), use("b.weight", ("b", "weight"))),
        )  # fmt: skip
        fake = module["tied"]._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))
        parameters = {"a.weight": part, "b.weight": module["b"].weight}
        split = split_of(group)
        slots = split.slots_of(module, module_map)
        assert [(attribute, name) for _, attribute, name in slots] == [("weight", "a.weight")] * 2
        with split.presented(slots, parameters):
            shown = module["a"].weight
            assert isinstance(shown, SplitTensor)
            assert shown.shape == (4, 4)
            assert module["tied"].weight is fake
            assert type(module["b"].weight) is nn.Parameter
        assert module["a"].weight is part

    run_ranks(2, run)


@pytest.mark.parametrize(("sequence_parallel", "length", "held"), [(False, 6, 6), (True, 6, 3), (True, 5, 5)])
def test_what_crosses_a_boundary_is_held_in_parts_where_its_length_allows(sequence_parallel, length, held):
    whole = torch.arange(2.0 * length * 4).reshape(2, length, 4)

    def run(group):
        split = split_of(group, sequence_parallel=sequence_parallel)
        assert split.held_shape(HIDDEN, (2, length, 4)) == (2, held, 4)
        made = whole.clone().requires_grad_()
        part = split.leaving(HIDDEN, made)
        assert part.shape == (2, held, 4)
        arrived = split.arrived(HIDDEN, part, (2, length, 4))
        assert arrived.shape == whole.shape
        assert torch.equal(gather({"x": arrived})["x"], whole)
        # Consumers are replicated: everybody's gradient is the whole gradient, once.
        (gather(arrived) * whole).sum().backward()
        assert torch.equal(made.grad, whole)
        return part.detach()

    parts = run_ranks(2, run)
    assert torch.equal(torch.cat(parts, 1) if held < length else parts[0], whole)


def test_what_is_shared_out_otherwise_leaves_whole_or_along_the_sequence():
    whole = torch.arange(2.0 * 6 * 4).reshape(2, 6, 4)

    def run(group):
        split = split_of(group, sequence_parallel=True)
        first = slice(2 * group.rank, 2 * group.rank + 2)
        heads = SplitTensor(whole[..., first].clone(), Layout((2, 6, 4), 2), split.context)
        part = split.leaving(HIDDEN, heads)
        assert torch.equal(part, whole[:, 3 * group.rank : 3 * group.rank + 3])
        other = LiveTensor(key="o", shape=(2, 6, 4), dtype="float32", requires_grad=True, batch_dim=0)
        assert torch.equal(split.leaving(other, heads), whole)
        assert split.held_shape(other, (2, 6, 4)) == (2, 6, 4)

    run_ranks(2, run)


def test_blocks_with_an_entry_see_their_hidden_states_in_parts():
    def run(group):
        split = split_of(group, sequence_parallel=True)
        states = torch.ones(2, 6, 4)
        (entered,), kwargs = split.enter_block(3, (states,), {"mask": None})
        assert isinstance(entered, SplitTensor)
        assert kwargs == {"mask": None}
        (same,), _ = split.enter_block(2, (states,), {})
        assert same is states
        (same,), _ = split_of(group).enter_block(3, (states,), {})
        assert same is states

    run_ranks(2, run)


def test_custom_functions_get_wholes_while_computing():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def run(group):
        split = split_of(group, sequence_parallel=True)
        (entered,), _ = split.enter_block(3, (torch.ones(2, 6, 4),), {})
        with split.running({}):
            assert torch.equal(Twice.apply(entered), torch.full((2, 6, 4), 2.0))
        assert dict(split.context.gathered) == {"Twice": 1}

    run_ranks(2, run)


def test_modes_that_watch_the_step_see_its_own_functions_only():
    class Seen(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def run(group):
        split, seen = split_of(group, sequence_parallel=True), Seen()
        states, part = torch.ones(2, 6, 4, requires_grad=True), torch.ones(2, 3, 4)
        with split.running({}), seen:
            (entered,), _ = split.enter_block(3, (states,), {})
            split.arrived(HIDDEN, part, (2, 6, 4))
            assert seen.names == []
            torch.relu(entered)
            Once.apply(states)
            whole, seen.names = seen.names, []
            torch.relu(entered)
            Once.apply(entered)
        assert seen.names == whole

    run_ranks(2, run)


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
