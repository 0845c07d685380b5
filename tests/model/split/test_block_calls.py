import pytest
import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.model import find_blocks
from lightning_mist.model.sources.reference_decoder import LanguageModel, LanguageModelShape, hollow
from lightning_mist.model.split.block_calls import call_blocks, small_batches
from tests import zoo


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
