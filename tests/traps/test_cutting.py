import pytest

from tests.traps import cutting
from tests.traps.run import check, run_apart

CASES = [(name, plan) for name, trap in cutting.TRAPS.items() for plan in trap.plans]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_apart("cutting", tmp_path_factory.mktemp("traps"))


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_cut_batches_train_as_whole_ones_or_not_at_all(found, name, plan):
    check(cutting.TRAPS[name], plan, found[name, plan])
