import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import Checkpointing, OffloadRatios


def test_nothing_is_offloaded_by_default():
    assert not OffloadRatios().any


@pytest.mark.parametrize("name", ["parameters", "gradients", "optimizer", "activations"])
def test_each_ratio_counts_and_is_checked(name):
    assert OffloadRatios(**{name: 0.25}).any
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match=rf"offload\.{name} = {ratio}: a ratio lies in \[0, 1\]"):
            OffloadRatios(**{name: ratio})


def test_a_count_of_checkpointed_layers_is_not_negative():
    with pytest.raises(PlanError, match="checkpointed_layers = -1: a count of layers is not negative"):
        Checkpointing(layers=-1)
