"""What ranks make of what each has found about cutting batches."""

import pytest
import torch

from lightning_mist.runtime.cutting import CutRules
from lightning_mist.strategy.planning import division_proofs
from lightning_mist.strategy.planning.division_proofs import agree, prove_here
from tests import zoo


def agreed(monkeypatch, *rules):
    """What the first of some ranks makes of what all have found."""
    told = []
    for each in rules:
        monkeypatch.setattr(division_proofs, "of_all_ranks", lambda found: told.append(found) or [found])
        agree(each)
    monkeypatch.setattr(division_proofs, "of_all_ranks", lambda _: told)
    return agree(rules[0])


def test_rows_may_be_left_out_only_as_all_ranks_have_seen_it(monkeypatch):
    mine = CutRules(seen={("loss",): frozenset(["mean"])}, slices=((None, -1), (0, 3)))
    other = CutRules(seen={("loss",): frozenset(["mean", "sum"])}, slices=((1, None), (0, 3)))
    found = agreed(monkeypatch, mine, other)
    assert found.slices == ((0, 3),)
    assert found.results == {("loss",): "mean"}


def test_ranks_agree_on_how_far_labels_are_shifted(monkeypatch):
    rules = [CutRules(lap=1), CutRules(lap=0)]
    assert agreed(monkeypatch, rules[0], rules[0]) == rules[0]
    assert agreed(monkeypatch, *rules) == "the ranks compute their losses in different ways"


class Positions(zoo.Plain):
    """Has a place for each of twelve tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(9, 8), torch.nn.Parameter(torch.ones(12, 8))

    def training_step(self, batch, batch_idx):
        hidden = self.words(batch) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class OfTwelve(torch.autograd.Function):
    """Has gradients for twelve tokens only."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.tokens = hidden.shape[1]
        return hidden * 1

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.tokens == 12, "of twelve tokens only"
        return gradient


def of_tokens(module, step):
    return prove_here(module, ("blocks.0", "blocks.1"), step, torch.randint(0, 9, (4, 12)), 0)


def test_steps_for_one_number_of_tokens_do_not_take_them_in_chunks():
    module = Positions()
    found = of_tokens(module, lambda item: module.training_step(item, 0))
    assert "does not run on fewer tokens (RuntimeError" in found
    found = of_tokens(module, lambda item: OfTwelve.apply(module.words(item)).square().mean())
    assert found.startswith("the step has no gradients for fewer tokens: AssertionError: of twelve tokens only")


def test_only_what_the_step_says_of_fewer_tokens_is_a_refusal(monkeypatch):
    def fails(*_):
        raise KeyError("of our own")

    module = Positions()
    monkeypatch.setattr(division_proofs, "results_of", fails)
    with pytest.raises(KeyError, match="of our own"):
        of_tokens(module, lambda item: module.words(item).square().mean())
