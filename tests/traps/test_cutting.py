import pytest

from tests.tiers import asked_for, tiered
from tests.traps import cutting
from tests.traps.run import check, run_apart

FIRST = (
    "labels_later",
    "labels_uneven",
    "normalised_weights",
    "hinge",
    "contrastive",
    "term_later",
    "logs",
    "augmented",
)
EVERY = [(name, plan) for name, trap in cutting.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("cutting", tmp_path_factory.mktemp("traps"), asked_for(request, "name"))


@pytest.mark.parametrize(("name", "plan"), tiered(EVERY, [case for case in EVERY if case[0] in FIRST]))
def test_cut_batches_train_as_whole_ones_or_not_at_all(found, name, plan):
    check(cutting.TRAPS[name], plan, found[name, plan])
