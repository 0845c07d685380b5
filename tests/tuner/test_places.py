import pytest

from lightning_mist.tuner.places import slot_of
from lightning_mist.tuner.space import Shape
from tests.tuner.searches import stages_of


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_slot_has_the_rows_of_its_replicas(num_stages):
    space = stages_of(devices=4, rows=4).space
    slot = slot_of((space,), (0, num_stages, ()), 4, Shape(2))
    assert (slot.stage_index, slot.num_stages, slot.num_microbatches) == (0, num_stages, 4)
    assert slot.data_parallel_degree == 2
    # Sixteen rows in four microbatches, each for two.
    assert slot.rows == 2
    assert slot.batch_rows == 4
    assert slot.replicas == (2 if num_stages == 1 else space.least_replicas(4))


def test_replicas_are_what_all_parts_of_the_cluster_can_have():
    one, other = (stages_of(devices=4, rows=4, data_parallel_degrees=degrees).space for degrees in ((2, 4), (1, 2)))
    numbers = {space.least_replicas(8) for space in (one, other)}
    slot = slot_of((one, other), (0, 2, (0, 1)), 8, Shape(4))
    assert len(numbers) == 2
    assert slot.replicas == min(numbers)
    assert slot.parts == (0, 1)
