"""What ranks make of what each has found about cutting batches."""

import torch

from lightning_mist.runtime.cutting import CutRules
from lightning_mist.strategy.planning import division_proofs
from lightning_mist.strategy.planning.division_proofs import agree, prove_here
from tests import zoo


def test_rows_may_be_left_out_only_as_all_ranks_have_seen_it(monkeypatch):
    mine = CutRules(seen={("loss",): frozenset(["mean"])}, slices=((None, -1), (0, 3)))
    other = ("[]", {("loss",): frozenset(["mean", "sum"])}, ((1, None), (0, 3)))
    monkeypatch.setattr(division_proofs, "of_all_ranks", lambda found: [found, other])
    agreed = agree(mine)
    assert agreed.slices == ((0, 3),)
    assert agreed.results == {("loss",): "mean"}


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


def test_steps_for_one_number_of_tokens_do_not_take_them_in_chunks():
    module, batch = Positions(), torch.randint(0, 9, (4, 12))
    found = prove_here(module, ("blocks.0", "blocks.1"), lambda item: module.training_step(item, 0), batch, 0)
    assert "does not run on fewer tokens (RuntimeError" in found
