import numpy as np

from lightning_mist.plan import OffloadRatios
from lightning_mist.tuner.candidates.choices import SlotChoices, within
from lightning_mist.tuner.space.applied_space import ANYWHERE, Shape
from tests.tuner.problems import slot


def three():
    """Choices of 1, 4 and 4 devices."""
    found = slot([0, 0, 1], [1, 2, 2], [1, 2, 4], [3.0, 2.0, 1.0], [0.1, 0.2, 0.3])
    fields = {name: getattr(found, name) for name in SlotChoices.__slots__}
    fields |= {
        "peak_K": np.array([30.0, 20.0, 10.0]),
        "tensor_K": np.array([1, 1, 2]),
        "sequence_K": np.array([0, 0, 1]),
        "devices_K": np.array([1, 4, 4]),
        "shard_K": np.array([0, 2, 0]),
        "offload_KO": np.array([[0.0] * 5, [0.0, 0.0, 1.0, 0.25, 0.25], [0.5, 0.0, 0.0, 0.0, 1.0]]),
    }
    return SlotChoices(**fields)


def test_a_choice_says_how_its_devices_are_arranged_and_what_it_moves():
    found = three()
    assert [found.shape(index) for index in range(3)] == [Shape(1), Shape(4, shard=2), Shape(2, 2, True)]
    assert found.offload(0) == OffloadRatios()
    assert found.offload(1) == OffloadRatios(optimizer=1.0, activations=0.25)
    assert found.offload(2) == OffloadRatios(parameters=0.5, checkpoints=1.0)


def test_choices_are_taken_by_index_and_by_mask_and_joined_again():
    found = three()
    by_index, by_mask = found.take(np.array([2, 0])), found.take(found.steady_K > 1.5)
    assert by_index.devices_K.tolist() == [4, 1]
    assert by_mask.steady_K.tolist() == [3.0, 2.0]
    joined = SlotChoices.joined([by_mask, SlotChoices.none(), by_index])
    assert len(joined) == 4
    assert joined.peak_K.tolist() == [30.0, 20.0, 10.0, 30.0]
    assert joined.offload(1) == found.offload(1)


def test_no_choices_have_the_types_of_some():
    none, some = SlotChoices.none(), three()
    assert len(none) == 0
    for name in SlotChoices.__slots__:
        assert getattr(none, name).dtype == getattr(some, name).dtype, name
        assert getattr(none, name).ndim == getattr(some, name).ndim, name


def test_choices_leave_every_other_stage_a_layer_and_a_device():
    starts = [0, 1, 2, 3, ANYWHERE, ANYWHERE, 1]
    layers = [1, 1, 2, 2, 3, 4, 1]
    devices = [1, 1, 1, 1, 1, 1, 3]
    choices = slot(starts, layers, devices, [1.0] * 7, [0.0] * 7)
    found = within(choices, stage_index=1, num_stages=3, num_layers=5, most_devices=2)
    assert found.tolist() == [False, True, True, False, True, False, False]
