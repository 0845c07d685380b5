"""A family of traps runs as a whole before the first of its tests is judged."""

from pathlib import Path

import pytest

SECONDS = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give families the time that all of their fits take."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(SECONDS))
