import pytest

from tests.tiers import asked_for
from tests.traps import cutting
from tests.traps.run import cases, check, run_apart

FIRST = ("labels_later", "annealed", "flagged_maximum", "added_later")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("cutting", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(cutting.TRAPS, FIRST))
def test_cut_batches_train_as_whole_ones_or_not_at_all(found, name, plan):
    check(cutting.TRAPS[name], plan, found[name, plan])
