import itertools
from pathlib import Path

import pytest

from tests.tiers import covering

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st
from tests.tiers import examples

SEEN = []

@pytest.mark.parametrize("other", "ab")
@pytest.mark.parametrize("seed", range(8))
def test_seeds(seed, other): pass

@pytest.mark.combinations
@pytest.mark.parametrize("plan", range(4))
@pytest.mark.parametrize("model", range(4))
def test_combinations(model, plan): pass

@pytest.mark.thorough
def test_thorough(): pass

@settings(max_examples=examples(40))
@given(st.integers())
def test_property(number): SEEN.append(number)

def test_count(): assert len(SEEN) == EXPECTED
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    def make(expected):
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        pytester.makeini("[pytest]\nmarkers =\n thorough\n combinations\n gpu\n")
        pytester.makeconftest("from tests.conftest import *")
        return pytester.makepyfile(TESTS.replace("EXPECTED", str(expected)))

    return make


def test_the_first_tier_has_a_quarter_of_what_is_random(suite, pytester):
    suite(10)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(
        passed=2 * 2 + 4 + 2, deselected=12 + 12 + 1
    )


def test_everything_is_everything(suite, pytester):
    suite(40)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "--all").assert_outcomes(passed=16 + 16 + 1 + 2)


def test_tests_that_are_named_run_whole(suite, pytester):
    path = suite(40)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", f"{path.name}::test_seeds").assert_outcomes(passed=16)


@pytest.mark.parametrize("sizes", [(1,), (9,), (9, 29), (2, 3, 5)])
def test_every_value_of_every_parameter_is_taken(sizes):
    cases = [{str(at): str(value) for at, value in enumerate(case)} for case in itertools.product(*map(range, sizes))]
    chosen = [cases[at] for at in covering(cases)]
    assert {pair for case in cases for pair in case.items()} == {pair for case in chosen for pair in case.items()}
    assert len(chosen) == max(sizes)


def test_where_combinations_are_lacking_no_value_is():
    cases = [{"model": "a", "plan": str(plan)} for plan in range(7)] + [{"model": "b", "plan": "1"}]
    chosen = [cases[at] for at in covering(cases)]
    assert {case["plan"] for case in chosen} == set("0123456")
    assert {case["model"] for case in chosen} == {"a", "b"}
