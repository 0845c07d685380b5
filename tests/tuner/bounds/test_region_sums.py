import numpy as np
import pytest

from lightning_mist.tuner.bounds.range_bounds import least_sums


@pytest.mark.parametrize("values", [[3.0, 3.0, 3.0], [5.0, 1.0, 2.0, 0.0, 7.0], [2.0], []])
def test_least_sums_are_those_of_the_best_ranges(values):
    wanted = [
        min((sum(values[start : start + length]) for start in range(len(values) - length + 1)), default=0.0)
        for length in range(len(values) + 1)
    ]
    np.testing.assert_allclose(least_sums(np.array(values)), wanted)
