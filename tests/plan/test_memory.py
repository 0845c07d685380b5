import pytest

from lightning_mist.errors import PlanError
from lightning_mist.plan import OFFLOAD_KINDS, Checkpointing, OffloadRatios, StageMesh, StagePlan


def test_nothing_is_offloaded_by_default():
    assert not OffloadRatios().any


@pytest.mark.parametrize("name", OFFLOAD_KINDS)
def test_each_ratio_counts_and_is_checked(name):
    assert OffloadRatios(**{name: 0.25}).any
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(PlanError, match=rf"offload\.{name} = {ratio}: a ratio lies in \[0, 1\]"):
            OffloadRatios(**{name: ratio})


def test_checkpoints_go_with_activations_unless_they_have_a_ratio_of_their_own():
    both, own = OffloadRatios(activations=0.5), OffloadRatios(activations=0.5, checkpoints=0.0)
    assert [both.kept(recomputed=recomputed) for recomputed in (False, True)] == [0.5, 0.5]
    assert [own.kept(recomputed=recomputed) for recomputed in (False, True)] == [0.5, 0.0]
    assert OffloadRatios(activations=0.5, checkpoints=0.5) == both != own
    assert both.told == (("activations", 0.5),)
    assert own.told == (("activations", 0.5), ("checkpoints", 0.0))
    mesh, inputs = StageMesh(devices=(0,)), OffloadRatios(checkpoints=1.0)
    stage = StagePlan(
        layers=(3, 6), mesh=mesh, microbatch_size=1, checkpointing=Checkpointing(layers=2), offload=inputs
    )
    # What a later stage received stays.
    assert [stage.kept_ratio(layer) for layer in range(3, 6)] == [0.0, 1.0, 0.0]
    with pytest.raises(PlanError, match=r"offload\.checkpoints = 1\.0 with checkpointing = 'selective'"):
        StagePlan(
            layers=(0, 2),
            mesh=mesh,
            microbatch_size=1,
            checkpointing=Checkpointing(layers=1, kind="selective"),
            offload=inputs,
        )


def test_a_count_of_checkpointed_layers_is_not_negative():
    with pytest.raises(PlanError, match="checkpointed_layers = -1: a count of layers is not negative"):
        Checkpointing(layers=-1)
