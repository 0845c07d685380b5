import dataclasses

import numpy as np
import pytest

from lightning_mist.cost.memory.held_parameters import HeldBytes, Holdings, SharedOut, VariantHoldings
from tests.specs import candidates_of, spec

NETWORK = spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500), tied=True)


def frozen(*names):
    parameters = tuple(
        dataclasses.replace(item, trainable=item.trainable and not item.name.startswith(names))
        for item in NETWORK.parameters
    )
    return dataclasses.replace(NETWORK, parameters=parameters)


SPECS = (NETWORK, frozen("wte"), frozen(NETWORK.parameters[-1].name))
OF_VARIANT = np.array([0, 2, 1, 2])


def stages():
    rng = np.random.default_rng(1)
    start = rng.integers(0, 4, 60)
    end = start + rng.integers(1, 5 - start)
    zero, variant = rng.integers(0, 4, 60), rng.integers(0, len(OF_VARIANT), 60)
    return candidates_of(start, end, zero=zero, variant_K=variant)


@pytest.mark.parametrize("kind", [HeldBytes, SharedOut])
def test_each_candidate_is_of_its_own_network(kind):
    holdings, some = VariantHoldings([Holdings(item) for item in SPECS], OF_VARIANT), stages()

    def ask(asked, candidates):
        return asked.of(candidates) if kind is HeldBytes else asked.shares(candidates, 3)

    # Some ranges are known when the others are asked for.
    ask(holdings, some.take(np.arange(0, len(some), 3)))
    found = ask(holdings, some)
    for index in range(len(some)):
        alone = ask(Holdings(SPECS[OF_VARIANT[some.variant_K[index]]]), some.take(np.array([index])))
        for name in kind.__slots__:
            assert getattr(found, name)[..., index] == pytest.approx(getattr(alone, name)[..., 0])


def test_gradients_by_region_are_those_of_each_variant():
    table = VariantHoldings([Holdings(item) for item in SPECS], OF_VARIANT).table
    for variant, network in enumerate(OF_VARIANT):
        alone = Holdings(SPECS[network]).table
        assert np.array_equal(table.single_R[variant], alone.single_R)
        # What is made is reduced, wherever it stays.
        assert np.array_equal(table.trained_R[variant], Holdings(NETWORK).table.trained_R)


def test_a_variant_must_be_named():
    unnamed = dataclasses.replace(stages(), variant_K=None)
    with pytest.raises(ValueError, match="which variant"):
        VariantHoldings([Holdings(item) for item in SPECS], OF_VARIANT).of(unnamed)
