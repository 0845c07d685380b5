"""A trap runs under all of its plans before the first of its tests is judged."""

from functools import cache
from pathlib import Path

import pytest

from tests.tiers import asked_for
from tests.traps.run import outcomes
from tests.workers import apart

SECONDS = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests the time that all fits of their trap take."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="module")
def outcome(request):
    """What became of a trap, by family, name and plan."""
    asked = asked_for(request, "family", "name", "plan")

    @cache
    def found(*trap):
        return apart(outcomes, *trap, [plan for *other, plan in asked if (*other,) == trap], seconds=SECONDS)

    return lambda family, name, plan: found(family, name)[plan]
