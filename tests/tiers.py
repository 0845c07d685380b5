"""Two tiers of tests: what every change runs, and everything.

The first tier leaves out

* tests marked ``thorough``;
* of random instances three of four: of a test with a parameter ``seed`` or ``first_seed`` the cases, of a property the
  examples;
* of a test marked ``combinations`` all combinations of its parameters' values but so many that every value of every
  parameter occurs;
* of a test marked ``sample`` three of four cases: examples of what others show too.

``pytest --all`` runs everything. Tests that are named (``file.py::test``) run whole.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

SHARE = 4
"""One of so many is in the first tier."""

EVERYTHING = "everything"
FIRST_TIER = "first-tier"

_SEEDS = ("seed", "first_seed")
_EXAMPLES = 100

settings.register_profile(EVERYTHING, deadline=None, derandomize=True, print_blob=True, max_examples=_EXAMPLES)
settings.register_profile(FIRST_TIER, settings.get_profile(EVERYTHING), max_examples=_EXAMPLES // SHARE)


def asks_for_everything(config: "pytest.Config") -> bool:
    """Whether both tiers run: asked for, or tests are named."""
    return bool(config.getoption("--all")) or any("::" in argument for argument in config.args)


def examples(count: int) -> int:
    """How many examples a property is tried on that has ``count`` of them when everything runs."""
    return max(1, count * settings().max_examples // _EXAMPLES)


def tiered(values: Iterable[T], first: Container[T]) -> list[Any]:
    """Values of a parameter, or tuples of those of several, of which only some are in the first tier."""
    import pytest

    def marked(value: T) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough)

    return [value if value in first else marked(value) for value in values]


def asked_for(request: "pytest.FixtureRequest", *parameters: str, test: str = "") -> list[Any]:
    """Values that a parameter has in this module's tests that run, or tuples of those of several."""
    found: list[Any] = []
    for item in request.session.items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and test in item.name and given.keys() >= set(parameters):
            values = tuple(given[name] for name in parameters)
            found.append(values if len(parameters) > 1 else values[0])
    return [value for value in dict.fromkeys(found) if value is not None]


def first_tier(items: "Sequence[pytest.Item]") -> "tuple[list[pytest.Item], list[pytest.Item]]":
    """Tests of the first tier, and those that it leaves out."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    chosen = {id(item) for family in families.values() for item in _chosen(family)}
    kept = [item for item in items if id(item) in chosen]
    return kept, [item for item in items if id(item) not in chosen]


def _chosen(family: "Sequence[pytest.Item]") -> "list[pytest.Item]":
    """Which cases of one test are in the first tier."""
    family = [item for item in family if item.get_closest_marker("thorough") is None]
    if not family:
        return []
    parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in family]
    if not parameters[0].keys().isdisjoint(_SEEDS):
        numbers: dict[str, int] = defaultdict(int)
        kept = []
        for item, values in zip(family, parameters, strict=True):
            others = repr([values[name] for name in values if name not in _SEEDS])
            if numbers[others] % SHARE == 0:
                kept.append(item)
            numbers[others] += 1
        return kept
    if family[0].get_closest_marker("combinations"):
        cases = [{name: repr(value) for name, value in values.items()} for values in parameters]
        return [family[at] for at in covering(cases)]
    return family[::SHARE] if family[0].get_closest_marker("sample") else family


def covering(cases: "Sequence[dict[str, str]]") -> list[int]:
    """Few cases that have every value of every parameter among them: always that with most values that lack."""
    lacking = {pair for case in cases for pair in case.items()}
    chosen = []
    while lacking:
        best = max(range(len(cases)), key=lambda at: len(lacking & cases[at].items()))
        chosen.append(best)
        lacking -= cases[best].items()
    return sorted(chosen)
