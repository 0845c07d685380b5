"""What ranks make of what each has found about cutting batches."""

from lightning_mist.runtime.cutting import CutRules
from lightning_mist.strategy.planning import division_proofs
from lightning_mist.strategy.planning.division_proofs import agree


def test_rows_may_be_left_out_only_as_all_ranks_have_seen_it(monkeypatch):
    mine = CutRules(seen={("loss",): frozenset(["mean"])}, slices=((None, -1), (0, 3)))
    other = ("[]", {("loss",): frozenset(["mean", "sum"])}, ((1, None), (0, 3)))
    monkeypatch.setattr(division_proofs, "of_all_ranks", lambda found: [found, other])
    agreed = agree(mine)
    assert agreed.slices == ((0, 3),)
    assert agreed.results == {("loss",): "mean"}
