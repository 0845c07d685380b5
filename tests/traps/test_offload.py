"""Nobody who looks at what is in host memory sees anything but what is there under DDP."""

import pytest

from tests.tiers import asked_for
from tests.traps import offload
from tests.traps.run import cases, check, run_apart

FIRST = ("state halved", "weights clamped", "saved between steps")


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    return run_apart("offload", tmp_path_factory.mktemp("traps"), asked_for(request, "name", "plan"))


@pytest.mark.parametrize(("name", "plan"), cases(offload.TRAPS, FIRST))
def test_who_looks_sees_what_ddp_shows(found, name, plan):
    check(offload.TRAPS[name], plan, found[name, plan])
