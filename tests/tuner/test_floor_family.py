"""Passes against trying everything: families whose stages have a few layers and devices to choose from."""

import itertools

import numpy as np
import pytest

from lightning_mist.tuner.floor_family import FloorFamily, FloorWalks, StageFloors


def random_floors(rng, layers, devices, share):
    found = [(n, length) for n in range(1, devices) for length in range(1, layers) if rng.random() < share]
    numbers = np.array(found, dtype=np.int64).reshape(-1, 2)
    steady = (numbers[:, 1] + rng.random(len(numbers))) / numbers[:, 0]
    reach = steady + rng.random(len(numbers))
    return StageFloors(layers_V=numbers[:, 1], devices_V=numbers[:, 0], steady_V=steady, reach_V=reach)


def random_family(seed):
    rng = np.random.default_rng(seed)
    layers, devices = int(rng.integers(2, 7)), int(rng.integers(2, 6))
    share = rng.choice([0.2, 0.6, 1.0])
    counts = sorted(rng.choice([2, 3, 4], size=int(rng.integers(1, 4)), replace=False).tolist())
    sizes = layers, devices, int(rng.choice([1, 2, 5, 40]))
    tails = [random_floors(rng, layers, devices, share) for _ in range(max(counts) - 1)]
    return FloorFamily.of(sizes, tails, {count: random_floors(rng, layers, devices, share) for count in counts})


def pipelines(family):
    """Every pipeline: the place of its number of stages, and the choice of each."""
    for at, count in enumerate(family.counts_C):
        rows = [family.heads_CV[at], *family.tails_BV[: count - 1][::-1]]
        for chosen in itertools.product(*(np.flatnonzero(row < np.inf) for row in rows)):
            layers, devices = family.layers_V[list(chosen)].sum(), family.devices_V[list(chosen)].sum()
            if layers == family.num_layers and devices == family.num_devices:
                steady = [float(row[index]) for row, index in zip(rows, chosen, strict=True)]
                yield at, chosen, steady, float(family.reach_CV[at, chosen[0]]) + sum(steady[1:])


@pytest.mark.parametrize("seed", range(60))
def test_passes_find_what_trying_everything_does(seed):
    family, rng = random_family(seed), np.random.default_rng(seed)
    walks, every = FloorWalks(family), list(pipelines(family))
    slowest = sorted(max(steady) for _, _, steady, _ in every)
    for pace in [*rng.choice(slowest, size=min(3, len(slowest)), replace=False), 1e3] if slowest else [1e3]:
        some = [item for item in every if max(item[2]) <= pace]
        walk = walks.walk(pace)
        least, fastest = np.full((2, len(family.counts_C)), np.inf)
        through = {name: np.full(getattr(family, name).shape, np.inf) for name in ("tails_BV", "heads_CV")}
        for at, chosen, steady, total in some:
            least[at], fastest[at] = min(least[at], total), min(fastest[at], max(steady))
            through["heads_CV"][at, chosen[0]] = min(through["heads_CV"][at, chosen[0]], total)
            for behind, index in enumerate(chosen[:0:-1]):
                through["tails_BV"][behind, index] = min(through["tails_BV"][behind, index], total)
        if walk is None:
            assert not some
            continue
        np.testing.assert_allclose(walk.least_C, least)
        np.testing.assert_allclose(walks.fastest(walk), fastest)
        tails_BV, heads_CV = walks.through(walk, np.ones(len(family.counts_C), dtype=bool))
        np.testing.assert_allclose(tails_BV, through["tails_BV"])
        np.testing.assert_allclose(heads_CV, through["heads_CV"])


def test_numbers_of_stages_that_are_of_no_interest_do_not_count():
    family = next(family for family in map(random_family, range(100)) if len(family.counts_C) == 3)
    walks = FloorWalks(family)
    walk = walks.walk(1e3)
    open_C = np.array([False, True, False])
    tails_BV, heads_CV = walks.through(walk, open_C)
    assert np.isinf(heads_CV[[0, 2]]).all()
    assert np.isinf(tails_BV[family.counts_C[1] - 1 :]).all()
    assert tails_BV[0].min() == pytest.approx(walk.least_C[1])


def test_a_family_ends_where_a_stage_has_no_choice():
    rng = np.random.default_rng(0)
    some, none = random_floors(rng, 6, 4, 1.0), random_floors(rng, 6, 4, 0.0)
    family = FloorFamily.of((6, 4, 4), [some, none, some], dict.fromkeys((2, 3, 4), some))
    assert family.counts_C.tolist() == [2]
    assert len(family.tails_BV) == 1
    family = FloorFamily.of((6, 4, 4), [none, some], dict.fromkeys((2, 3), some))
    assert not len(family.counts_C)
    assert not len(family.tails_BV)
    assert FloorWalks(family).walk(1e3) is None
