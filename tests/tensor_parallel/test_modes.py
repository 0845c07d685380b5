"""Split tensors under what else torch does: autocast, no gradients, hooks on saved tensors, fakes, dropout."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from lightning_mist.plan import ParameterSplit
from lightning_mist.tensor_parallel import (
    CountingGroup,
    SplitContext,
    SplitTensor,
    functions_of_wholes,
    local_of,
    present,
    run_ranks,
    split_sequence,
    unshard,
    whole,
)
from tests import zoo
from tests.tensor_parallel.splitting import compare, install

WIDTH, WORDS = 32, 96
WORD_SPLITS = [ParameterSplit(name="head.weight", dim=0, factors=((WORDS, True),))]


def block_splits(prefix: str = "") -> list[ParameterSplit]:
    return [
        ParameterSplit(name=f"{prefix}attn.c_attn.weight", dim=0, factors=((3, False), (WIDTH, True))),
        ParameterSplit(name=f"{prefix}attn.c_attn.bias", dim=0, factors=((3, False), (WIDTH, True))),
        ParameterSplit(name=f"{prefix}attn.c_proj.weight", dim=1, factors=((WIDTH, True),)),
        ParameterSplit(name=f"{prefix}mlp.0.weight", dim=0, factors=((4 * WIDTH, True),)),
        ParameterSplit(name=f"{prefix}mlp.0.bias", dim=0, factors=((4 * WIDTH, True),)),
        ParameterSplit(name=f"{prefix}mlp.2.weight", dim=1, factors=((4 * WIDTH, True),)),
    ]


class Words(nn.Module):
    """A model whose embedding and head share a table of words."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        if tied:
            self.table.weight = self.head.weight
        self.block = zoo.Block(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor, context: SplitContext | None) -> Tensor:
        x = self.table(words)
        if context is not None and context.sequence_parallel:
            x = split_sequence(x, 1, context)
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.view(-1, WORDS), words.flatten().roll(1), ignore_index=5)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_parallel_model(tied: bool, sequence_parallel: bool, degree: int):
    torch.manual_seed(0)
    module, words = Words(tied).double(), torch.randint(0, WORDS, (3, 8))
    splits = [*block_splits("block."), *WORD_SPLITS]
    if not tied:
        splits += [ParameterSplit(name=name, dim=0, factors=((WORDS, True),)) for name in ("table.weight", "head.bias")]
    compare(module, lambda m, context: m(words, context), splits, degree, sequence_parallel=sequence_parallel)


def test_a_head_that_is_whole_computes_losses_of_its_part_of_the_sequence():
    torch.manual_seed(0)
    module, words = Words().double(), torch.randint(0, WORDS, (3, 8))
    compare(module, lambda m, context: m(words, context), block_splits("block."), sequence_parallel=True)


def test_a_sequence_that_does_not_divide_stays_whole():
    torch.manual_seed(0)
    module, words = Words().double(), torch.randint(0, WORDS, (3, 7))
    splits = [*block_splits("block."), *WORD_SPLITS]
    compare(module, lambda m, context: m(words, context), splits, sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_autocast(sequence_parallel: bool):
    torch.manual_seed(0)
    module, words = Words(), torch.randint(0, WORDS, (3, 8))
    seen = []

    def call(m: nn.Module, context: SplitContext | None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(words, context)
        seen.append(loss.dtype)
        return loss

    # bfloat16 keeps 8 bits, and the parts are rounded before they are added up
    compare(module, call, [*block_splits("block."), *WORD_SPLITS], sequence_parallel=sequence_parallel, tolerance=3e-2)
    assert set(seen) == {torch.float32}


def test_without_gradients():
    torch.manual_seed(0)
    module, words = Words().double(), torch.randint(0, WORDS, (3, 8))
    with torch.no_grad():
        expected = module(words, None)
    for mode, along_sequence in product((torch.no_grad, torch.inference_mode), (False, True)):

        def rank(group: Any, mode: Any = mode, along_sequence: bool = along_sequence) -> Tensor:
            context = SplitContext(group, along_sequence)
            mine = copy.deepcopy(module)
            install(mine, [*block_splits("block."), *WORD_SPLITS], context)
            with mode():
                return mine(words, context)

        for value in run_ranks(2, rank):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_saved_tensors_are_ordinary_ones():
    saved: list[Any] = []

    def rank(group: Any) -> None:
        context = SplitContext(group)
        block = zoo.Block(WIDTH, 4)
        install(block, block_splits(), context)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(type(t)) or t.clone(), lambda t: t):
            out = block(torch.randn(2, 4, WIDTH, requires_grad=True))
        out.sum().backward()

    run_ranks(2, rank)
    assert saved
    assert all(not issubclass(kind, SplitTensor) for kind in saved)


def test_frozen_parameters_get_no_gradient_and_pass_one_on():
    torch.manual_seed(0)
    block = zoo.Block(WIDTH, 4).double()
    for name, parameter in block.named_parameters():
        parameter.requires_grad_("ln" in name)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    compare(block, lambda m, _: m(x), block_splits(), 4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_recomputed_alike(sequence_parallel: bool):
    def gradients(group: Any, is_checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        context = SplitContext(group, sequence_parallel)
        block = zoo.Block(WIDTH, 4, dropout=0.5).double()
        parameters = install(block, block_splits(), context)
        x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
        shown = split_sequence(x, 1, context) if sequence_parallel else x
        with functions_of_wholes():
            out = checkpoint(block, shown, use_reentrant=False) if is_checkpointed else block(shown)
            whole(out).square().sum().backward()
        return [x.grad, *(local_of(parameter).grad for parameter in parameters.values())]

    plain = run_ranks(2, lambda group: gradients(group, False))
    again = run_ranks(2, lambda group: gradients(group, True))
    for one, other in zip(plain, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(plain[0][0], plain[1][0])


def test_parts_are_leaves_of_nested_containers():
    split = ParameterSplit(name="w", dim=0, factors=((4, True),))

    def rank(group: Any) -> Any:
        shown = present(torch.arange(2.0) + 2 * group.rank, split, SplitContext(group))
        value = {"a": [shown, 1], "b": (None, shown * 2)}
        assert len(tree_flatten(value)[0]) == 4
        assert isinstance(tree_map(lambda leaf: leaf, value)["a"][0], SplitTensor)
        return whole(value)

    for value in run_ranks(2, rank):
        assert value["a"][0].tolist() == [0, 1, 2, 3]
        assert value["b"][1].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fake_tensors_and_counted_collectives(sequence_parallel: bool):
    group, calls = CountingGroup(2), []
    group.watcher = lambda *call: calls.append(call)
    context = SplitContext(group, sequence_parallel)
    with FakeTensorMode():
        block = zoo.Block(WIDTH, 4, dropout=0.1)
        install(block, block_splits(), context)
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        shown = split_sequence(x, 1, context) if sequence_parallel else x
        out = local_of(block(shown))
        assert isinstance(out, FakeTensor)
        forward = list(calls)
        out.sum().backward()
        assert x.grad.shape == x.shape
    hidden, norm = 2 * 8 * WIDTH * 4, WIDTH * 4
    backward = calls[len(forward) :]
    if sequence_parallel:
        assert forward == [("all_gather", hidden), ("reduce_scatter", hidden)] * 2
        # of each half: its output's gradient gathered, its input's scattered; then gradients of norms and biases
        large = [call for call in backward if call[1] == hidden]
        assert large == [("all_gather", hidden), ("reduce_scatter", hidden)] * 2 + [("all_gather", hidden)]
        assert [call for call in backward if call[1] == norm] == [("all_reduce", norm)] * 6
        assert len(backward) == 11
    else:
        assert forward == [("all_reduce", hidden)] * 2
        assert backward == [("all_reduce", hidden)] * 2


def test_parts_put_together_are_the_whole_gradient():
    split = ParameterSplit(name="w", dim=1, factors=((2, False), (4, True), (3, False)))
    full = torch.randn(5, 24, dtype=torch.float64)

    def rank(group: Any) -> Tensor:
        from lightning_mist.tensor_parallel import shard

        local = shard(full, split, group.rank, group.size).requires_grad_()
        (whole(present(local, split, SplitContext(group))) * full).sum().backward()
        return local.grad

    torch.testing.assert_close(unshard(run_ranks(4, rank), split), full)


def test_evaluation_of_encoders_takes_no_fast_path_past_parts():
    torch.manual_seed(0)
    module = zoo.Encoder(2).double().eval()
    batch = zoo.token_batch(4)
    packed = ("in_proj_weight", "in_proj_bias")
    splits = [
        ParameterSplit(name=name, dim=0, factors=((3, False), (WIDTH, True)))
        for name, _ in module.named_parameters()
        if name.endswith(packed)
    ] + [
        ParameterSplit(name=name, dim=1, factors=((WIDTH, True),))
        for name, _ in module.named_parameters()
        if name.endswith("out_proj.weight")
    ]
    with torch.no_grad():
        expected = module.training_step(batch, 0)

    def rank(group: Any) -> Any:
        context = SplitContext(group)
        mine = copy.deepcopy(module)
        install(mine, splits, context)
        with torch.no_grad(), functions_of_wholes():
            return mine.training_step(batch, 0), context.gathered

    for value, gathered in run_ranks(2, rank):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
        assert not gathered
