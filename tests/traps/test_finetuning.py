"""What is frozen stays so, and what is trained is trained as under DDP."""

import pytest

from tests.tiers import asked_for
from tests.traps import finetuning
from tests.traps.run import cases, check, run_apart

FIRST = ("saves adapters", "unfreezes by hand", "adapter added late")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("finetuning", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(finetuning.TRAPS, FIRST))
def test_it_trains_as_under_ddp_or_not_at_all(found, name, plan):
    check(finetuning.TRAPS[name], plan, found[name, plan])
