import numpy as np
import pytest

from lightning_mist.errors import PlanError
from lightning_mist.tuner import SearchSpace, tune
from lightning_mist.tuner.space.applied_space import apply
from tests.specs import cluster, profile, spec

ALIKE = spec(6, measured=True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"microbatch_sizes": ()}, r"microbatch_sizes=\(\): give at least one number"),
        ({"data_parallel_degrees": (0,)}, r"data_parallel_degrees=\(0,\): give at least one number, each at least 1"),
        ({"layer_cuts": (4, 2)}, r"layer_cuts=\(4, 2\): .*more than the one before; give for example \(12, 24\)"),
        ({"layer_cuts": (2, 4), "num_stages": (2,)}, r"make 3 stages, but .* num_stages=\(2,\) do not allow"),
        ({"layer_cuts": (2,), "equal_stages": True}, r"equal_stages=True and layer_cuts=\(2,\): .* leave one out"),
        ({"layer_cuts": (2,), "max_stages": 1}, r"make 2 stages, but max_stages=1"),
        ({"checkpointed_shares": (1.5,)}, r"checkpointed_shares=\(1.5,\): give at least one fraction in \[0, 1\]"),
        ({"offload_ratios": (-0.5,)}, r"offload_ratios=\(-0.5,\): give at least one fraction"),
        ({"offload": ("weights",)}, r"offload=\('weights',\): of parameters, gradients, optimizer, activations"),
        ({"tail_chunks": (0,)}, r"tail_chunks=\(0,\): give at least one number, each at least 1"),
        ({"chunks": (1,)}, r"chunks=\(1,\): give numbers of at least 2"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        SearchSpace(**asked)


def test_cuts_lie_inside_the_network():
    with pytest.raises(PlanError, match=r"layer_cuts = \(2, 6\): .* has 6 layers, so that cuts lie between 1 and 5"):
        apply(SearchSpace(layer_cuts=(2, 6)), ALIKE, 4, 16)


def found(**search):
    return tune(
        ALIKE, cluster(4), profile=profile(), global_batch_size=16, memory_limit=10**7, search=SearchSpace(**search)
    ).plan


def test_layers_can_be_pinned():
    assert [stage.layers for stage in found(layer_cuts=(1, 4)).stages] == [(0, 1), (1, 4), (4, 6)]
    assert [stage.layers for stage in found(layer_cuts=()).stages] == [(0, 6)]


def test_rows_and_degrees_can_be_pinned():
    assert {stage.microbatch_size for stage in found(microbatch_sizes=(1,)).stages} == {1}
    assert {stage.data_parallel_degree for stage in found(data_parallel_degrees=(2,)).stages} == {2}


def test_recomputation_can_be_none_or_all():
    space = apply(SearchSpace(checkpointed_shares=(0.0, 1.0)), ALIKE, 4, 16)
    window_J, kept_K = space.recomputed(np.arange(1, 7))
    found_K = {(int(window) + 1, int(kept)) for window, kept in zip(window_J, kept_K, strict=True)}
    assert found_K == {(layers, kept) for layers in range(1, 7) for kept in (0, layers)}


@pytest.mark.parametrize("name", ["num_stages", "layer_cuts", "zero_stages", "offload_ratios", "chunks"])
def test_several_values_are_a_tuple_and_one_is_refused(name):
    asked = SearchSpace(**{name: [1] if name != "chunks" else [2]})
    assert asked == SearchSpace(**{name: (1,) if name != "chunks" else (2,)})
    assert hash(asked) is not None
    with pytest.raises(ValueError, match=rf"{name}=2: there may be several; give \(2,\)"):
        SearchSpace(**{name: 2})


def test_a_word_is_not_taken_for_its_letters():
    with pytest.raises(ValueError, match=r"schedules='1f1b': there may be several; give \('1f1b',\)"):
        SearchSpace(schedules="1f1b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, ("x",)) for name in ("num_stages", "layer_cuts", "zero_stages", "shard_degrees", "chunks")),
        *((name, (None,)) for name in ("num_microbatches", "devices_per_stage", "checkpointed_shares", "schedules")),
        *((name, "x") for name in ("max_stages", "data_parallel_size", "solver_seconds", "equal_stages")),
        *((name, None) for name in ("checkpointing", "zero_stages", "solver_seconds")),
        *((name, True) for name in ("max_stages", "solver_seconds")),
        *((name, 1) for name in ("sequence_parallel", "checkpointing")),
        ("num_stages", (1.5,)),
        ("offload", (5,)),
    ],
)
def test_limits_of_another_type_are_refused(name, value):
    with pytest.raises(TypeError, match=rf"^{name}=.*: .* (is|are) needed"):
        SearchSpace(**{name: value})


@pytest.mark.parametrize("name", ["offload_ratios", "checkpointed_shares"])
def test_what_is_no_number_is_no_fraction(name):
    with pytest.raises(ValueError, match=rf"^{name}=\(nan,\): give at least one fraction"):
        SearchSpace(**{name: (float("nan"),)})
