import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mist.errors import TraceError
from lightning_mist.model import find_blocks
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from lightning_mist.model.split.split_check import (
    BlockCall,
    CheckedRun,
    Reference,
    call_blocks,
    install,
    leaves_of,
    numbers,
    prepare,
    run_block,
    small_batches,
)
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from tests import zoo

SEQUENCE = SequenceSplit(position=0, leaf=0, dim=1)
SPLITS = (
    ParameterSplit(name="up.weight", dim=0, factors=((24, True),)),
    ParameterSplit(name="up.bias", dim=0, factors=((24, True),)),
    ParameterSplit(name="down.weight", dim=1, factors=((24, True),)),
)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def between(self, y: Tensor) -> Tensor:
        return F.dropout(F.gelu(y), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(self.norm(x))))


def call(block, dtype=torch.float32):
    x = torch.randn(2, 8, 16, dtype=dtype)
    return BlockCall(block=block, args=(x,), kwargs={}, depends=(True,), answer=None, hidden=0)


def checked(block, splits=SPLITS, degree=2, sequence=None, dtype=torch.float64):
    return prepare(call(block), dtype)(splits, degree, sequence)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_block_that_computes_the_same_passes(degree):
    block = FeedForward()
    before = {name: (parameter, parameter.clone()) for name, parameter in block.named_parameters()}
    outcome = checked(block, degree=degree)
    assert (outcome.reason, outcome.gathered, outcome.sequence_leaves) == (None, (), ())
    for name, parameter in block.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


@pytest.mark.parametrize("degree", [2, 4])
def test_parts_of_sequences_go_in_and_come_out(degree):
    outcome = checked(FeedForward(), degree=degree, sequence=SEQUENCE)
    assert (outcome.reason, outcome.gathered, outcome.sequence_leaves) == (None, (), ((0, 1),))


def test_a_function_without_a_rule_is_counted():
    class Sorted(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            return y.sort(-1).values

    outcome = checked(Sorted())
    assert outcome.reason is None
    assert outcome.gathered == (("sort", 1),)


class CubeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def test_a_custom_function_gets_the_whole_and_loses_no_gradient():
    class Cubed(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            return CubeFunction.apply(y)

    outcome = checked(Cubed())
    assert outcome.reason is None
    assert [count for _, count in outcome.gathered] == [1]


def test_a_gradient_that_gets_lost_is_found():
    class Lossy(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            # Looks behind the tensor that stands in for a part.
            return super().between(y) if type(y) is Tensor else super().between(y).detach() + 0 * y

    outcome = checked(Lossy())
    assert "gradient of" in outcome.reason
    assert "the tolerance is 1e-10" in outcome.reason


def test_other_random_numbers_on_every_rank_are_found():
    class Noisy(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            return y * random.random()

    assert "differs by" in checked(Noisy()).reason


def test_the_same_random_numbers_on_every_rank_are_allowed():
    class Noisy(FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    assert checked(Noisy()).reason is None


def test_an_error_of_parts_is_the_reason():
    class Picky(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            if type(y) is not Tensor:
                raise RuntimeError("only tensors")
            return y

    assert checked(Picky()).reason == "RuntimeError: only tensors"


def test_an_error_of_the_block_itself_is_raised():
    class Failing(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            raise RuntimeError("only on Mondays")

    with pytest.raises(RuntimeError, match="only on Mondays"):
        prepare(call(Failing()), torch.float64)


def test_computing_in_coarser_numbers_loosens_the_tolerance():
    class Mixed(FeedForward):
        def between(self, y: Tensor) -> Tensor:
            return y.float().tanh().to(y.dtype)

    def tolerance(block: nn.Module) -> float:
        values = numbers(block, torch.float64, seed=1)
        tensors, shown = leaves_of(values)
        install(values, shown)
        result, _, coarsest = run_block(call(block), torch.float64, tensors)
        return Reference.of(result, coarsest).tolerance

    assert checked(Mixed()).reason is None
    assert (tolerance(Mixed()), tolerance(FeedForward())) == (1e-4, 1e-10)


def test_a_parameter_held_by_two_slots_is_one():
    class Shared(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(16, 24)
            self.other.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.down(F.silu(self.up(y)) * self.other(y))

    more = (*SPLITS, ParameterSplit(name="other.bias", dim=0, factors=((24, True),)))
    assert checked(Shared(), more).reason is None


WEIGHT = torch.arange(24.0, dtype=torch.float64).view(6, 4) + 1
OF_RANKS = {
    "rows": ParameterSplit(name="weight", dim=0, factors=((6, True),)),
    "columns": ParameterSplit(name="weight", dim=1, factors=((4, True),)),
    "parts of rows": ParameterSplit(name="weight", dim=0, factors=((3, False), (2, True))),
}


def run(weight=WEIGHT, output=2.0, given=None):
    x = torch.full((2, 2), output, dtype=torch.float64)
    return CheckedRun(outputs=(x,), inputs=(x * 3 if given is None else given,), parameters={"weight": weight})


def compared(ranks, splits=(), whole=None):
    whole = run() if whole is None else whole
    return Reference.of(whole, torch.float64).difference(ranks, splits)


def parts(split):
    sizes = {"rows": (6,), "columns": (4,), "parts of rows": (3, 2)}[split]
    view = WEIGHT.unflatten(OF_RANKS[split].dim, sizes)
    dim = OF_RANKS[split].dim + len(sizes) - 1
    return [part.reshape(OF_RANKS[split].local_shape((6, 4), 2)) for part in view.chunk(2, dim)]


def test_equal_runs_do_not_differ():
    assert compared([run(), run()]) is None
    assert compared([run(WEIGHT * (1 + 1e-12))]) is None


@pytest.mark.parametrize("split", OF_RANKS)
def test_parts_are_held_against_their_places_in_the_whole(split):
    first, second = parts(split)
    assert compared([run(first), run(second)], [OF_RANKS[split]]) is None
    assert "gradient of parameter weight differs" in compared([run(second), run(first)], [OF_RANKS[split]])
    assert "gradient of parameter weight has shape (6, 4) on rank 0" in compared([run(), run()], [OF_RANKS[split]])


def test_what_differs_most_is_named_on_whichever_rank_it_is():
    said = compared([run(), run(output=2.1, given=run().inputs[0])])
    assert said == "the result 0 differs by 5.0e-02 of its size, the tolerance is 1e-10"
    assert "gradient of input 0 differs by 5.0e-01" in compared([run(), run(given=torch.full((2, 2), 9.0))])


def test_a_missing_gradient_differs_unless_it_is_zero():
    assert "gradient of parameter weight differs by inf" in compared([run(None)])
    nothing = run(torch.zeros(6, 4))
    assert compared([run(None)], whole=nothing) is None
    assert compared([nothing], whole=run(None)) is None


def test_what_is_zero_but_for_rounding_is_compared_with_its_kind():
    whole = CheckedRun(outputs=(), inputs=(), parameters={"big": torch.ones(2), "none": torch.full((2,), 1e-17)})
    other = CheckedRun(outputs=(), inputs=(), parameters={"big": torch.ones(2), "none": torch.full((2,), -3e-17)})
    assert compared([other], whole=whole) is None


def test_numbers_that_are_none_differ():
    assert "differs by nan" in compared([run(WEIGHT * float("nan"))])
    assert "differs by nan" in compared([run()], whole=run(WEIGHT * float("nan")))


def test_tensors_larger_than_a_piece_are_compared_to_their_end():
    whole = CheckedRun(outputs=(torch.zeros(3, 2**21),), inputs=(), parameters={})
    other = CheckedRun(outputs=(torch.zeros(3, 2**21),), inputs=(), parameters={})
    assert compared([other], whole=whole) is None
    other.outputs[0][2, -1] = 1.0
    assert compared([other], whole=whole) is not None


def test_other_numbers_of_results_differ():
    other = CheckedRun(outputs=(), inputs=(), parameters={"weight": WEIGHT})
    assert compared([other]) == "rank 0 gives 1 results and gradients instead of 3"


# How a step calls its blocks.


def called(name, rows=4):
    module, make_batch = zoo.make(name)
    return module, call_blocks(module, zoo.step(module), make_batch(rows), find_blocks(module))


def test_blocks_that_are_alike_are_called_once():
    _, calls = called("nano")
    assert calls.kinds.of == (0, 0, 0, 0)
    (example,) = calls.examples
    assert example.hidden == 0
    assert example.depends == (True,)
    assert example.args[0].shape == (2, 8, 32)
    assert not example.args[0].requires_grad


def test_blocks_with_other_arguments_are_another_kind():
    _, calls = called("t5")
    # Encoder: the first makes the table of positions, the others get it; the decoder likewise.
    assert calls.kinds.of == (0, 1, 1, 2, 3, 3)
    assert [sum(example.depends) for example in calls.examples] == [1, 2, 2, 3]


def test_caches_of_transformers_are_left_out():
    _, calls = called("gpt2")
    leaves = [*calls.examples[0].args, *calls.examples[0].kwargs.values()]
    assert all(isinstance(leaf, (Tensor, type(None), bool)) for leaf in leaves)


def test_a_block_that_transforms_nothing_has_no_hidden_state():
    class Widening(zoo.Plain):
        def block(self):
            return torch.nn.Sequential(torch.nn.Linear(zoo.WIDTH, 2 * zoo.WIDTH), torch.nn.Tanh())

        def training_step(self, batch, batch_idx):
            h = self.first(batch["x"])
            for block in self.blocks:
                h = block(h)[:, : zoo.WIDTH]
            return self.loss(h, batch)

    module = Widening()
    calls = call_blocks(module, zoo.step(module), zoo.xy_batch(4), find_blocks(module))
    assert calls.examples[0].hidden is None


def test_the_module_is_left_as_it_was():
    module, make_batch = zoo.make("gpt2")
    batch, state = make_batch(4), torch.get_rng_state()
    before = {name: (parameter, parameter.clone()) for name, parameter in module.named_parameters()}
    call_blocks(module, zoo.step(module), batch, find_blocks(module))
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_without_values_runs_without_multiplying():
    shape = LanguageModelShape(hidden=64, ffn=256, layers=3, heads=4, vocabulary=100)
    module = hollow(lambda: LanguageModel(shape, 64))
    batch = (torch.zeros(4, 64, dtype=torch.long), torch.zeros(4, 64, dtype=torch.long))
    calls = call_blocks(module, lambda batch: module.training_step(batch, 0), batch, find_blocks(module))
    assert calls.kinds.of == (0, 0, 0)
    assert calls.examples[0].args[0].shape == (2, 8, 64)
    assert module.tokens.weight.untyped_storage().nbytes() == 4


def test_a_step_that_needs_its_whole_batch_gets_it():
    class Whole(zoo.Plain):
        def training_step(self, batch, batch_idx):
            if len(batch["x"]) != 5:
                raise ValueError("five rows")
            return super().training_step(batch, batch_idx)

    module = Whole()
    calls = call_blocks(module, zoo.step(module), zoo.xy_batch(5), find_blocks(module))
    assert calls.examples[0].args[0].shape == (5, 16)


def test_a_step_that_fails_says_why():
    module, make_batch = zoo.make("broken")
    with pytest.raises(TraceError, match=r"cannot be run on a small batch: RuntimeError: no such column: price"):
        call_blocks(module, zoo.step(module), make_batch(4), find_blocks(module))


def test_blocks_that_do_not_run_are_an_error():
    module, make_batch = zoo.make("plain")
    module.spare = torch.nn.Linear(2, 2)
    with pytest.raises(TraceError, match="the step called 4 of 5 blocks"):
        call_blocks(module, zoo.step(module), make_batch(4), (*find_blocks(module), "spare"))


def test_small_batches_end_with_the_batch_itself():
    tokens = torch.zeros(4, 64, dtype=torch.long)
    assert [tuple(batch.shape) for batch in small_batches(tokens, 24)] == [(2, 24), (2, 64), (4, 64)]
    assert list(small_batches("text", 24)) == ["text"]
