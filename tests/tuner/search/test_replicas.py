import pytest

from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.search.replicas import degrees_of_copies, most_saved
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import spec


@pytest.mark.parametrize(
    ("devices", "limits", "wanted"),
    [
        (4, {}, {(2, 4), (4,)} - {(4,)}),
        (12, {}, {(2, 4, 6, 12), (3, 6, 12), (4, 12), (6, 12)}),
        (8, {"data_parallel_degrees": (2, 4)}, {(4,)}),
        (8, {"data_parallel_degrees": (2,)}, set()),
        (8, {"num_stages": (1,)}, set()),
        (1, {}, set()),
    ],
)
def test_degrees_are_multiples_of_every_number_of_copies(devices, limits, wanted):
    assert set(degrees_of_copies(apply(SearchSpace(**limits), spec(8), devices, 4 * devices))) == wanted


def test_at_most_the_batches_of_all_other_ranks_are_saved():
    assert most_saved(spec(4), apply(SearchSpace(), spec(4), 4, 32)) == 3 * 8 * 16
