import numpy as np
import pytest

from lightning_mist.tuner.candidates.choices import non_dominated, not_beaten


def brute_force(group, first, second):
    """Points that no other equals or beats in both values; of equal points the earliest."""
    kept = []
    for i in range(len(group)):
        beaten = any(
            group[j] == group[i]
            and first[j] <= first[i]
            and second[j] <= second[i]
            and ((first[j], second[j]) != (first[i], second[i]) or j < i)
            for j in range(len(group))
            if j != i
        )
        if not beaten:
            kept.append(i)
    return set(kept)


@pytest.mark.parametrize("seed", range(30))
def test_equals_comparing_every_pair(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 60))
    group = rng.integers(-1, 4, count)
    # Few distinct values, so that many are equal.
    first, second = rng.integers(0, 6, count) / 3.0, rng.integers(0, 6, count) / 7.0
    kept = non_dominated(group, first, second)
    wanted = brute_force(group, first, second)
    assert set(kept.tolist()) == wanted
    assert len(kept) == len(wanted)


def test_the_frontier_is_not_only_its_convex_hull():
    first, second = np.array([0.0, 1.0, 1.9, 2.0]), np.array([2.0, 1.5, 1.4, 0.0])
    assert non_dominated(np.zeros(4), first, second).tolist() == [0, 1, 2, 3]


def test_frontiers_come_by_group_and_rising_first_value():
    group, first = np.array([1, 0, 0, 1]), np.array([2.0, 3.0, 1.0, 1.0])
    second = np.array([1.0, 1.0, 2.0, 2.0])
    assert non_dominated(group, first, second).tolist() == [2, 1, 3, 0]


def test_values_of_any_size_are_told_apart():
    first, second = np.array([1.0, 2.0]), np.array([1e18 + 256, 1e18])
    assert len(non_dominated(np.array([0, 0]), first, second)) == 2


def test_what_none_of_the_others_beats():
    rng = np.random.default_rng(5)
    for _ in range(30):
        points, others = (
            (rng.integers(0, 3, count), rng.integers(0, 6, count) / 1.0, rng.integers(0, 6, count) / 1.0)
            for count in rng.integers(0, 12, 2)
        )
        expected = [
            not any(g == group and f <= first and s <= second for g, f, s in zip(*others, strict=True))
            for group, first, second in zip(*points, strict=True)
        ]
        assert not_beaten(*points, others).tolist() == expected
