"""The largest working set of a stage's units is the stage's."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost.memory import MemoryModel
from lightning_mist.plan import OFFLOAD_KINDS
from tests.cost.time.test_offload_seconds import candidates, ratios, slot
from tests.specs import spec
from tests.tiers import examples

NETWORKS = {
    "unlike": spec(6, kinds=(0, 1) * 3, widths=(1000, 2500), parameter_bytes=40_000, edge_bytes=120_000),
    "large edges": spec(6, parameter_bytes=4_000, edge_bytes=900_000),
    "tied": spec(6, parameter_bytes=4_000, edge_bytes=60_000, tied=True),
}
MODELS = {name: MemoryModel(network) for name, network in NETWORKS.items()}
KINDS = ("forward", "first backward", "backward")


@given(
    name=st.sampled_from(list(MODELS)),
    layers=st.sampled_from([(0, 6), (0, 3), (2, 4), (3, 6), (5, 6), (2, 3)]),
    checkpointed=st.integers(0, 6),
    zero=st.integers(0, 3),
    ranks=st.sampled_from([1, 2, 4]),
    moved=st.tuples(*[ratios] * len(OFFLOAD_KINDS)),
)
@settings(max_examples=examples(60))
def test_the_most_of_all_units_is_that_of_the_stage(name, layers, checkpointed, zero, ranks, moved):
    model, place = MODELS[name], slot(data_parallel_degree=ranks, num_stages=3, stage_index=1)
    some = candidates(
        layers,
        checkpointed=min(checkpointed, layers[1] - layers[0]),
        zero=zero,
        **dict(zip(OFFLOAD_KINDS, moved, strict=True)),
    )
    some = some if any(moved) else dataclasses.replace(some, offload=None)
    needs, found = model.needs(place, some), model.of_units(place, some)
    for kind in KINDS:
        there_R, most_R = found[kind]
        assert len(most_R) == layers[1] - layers[0] + (layers[0] == 0) + (layers[1] == 6)
        assert most_R.max() == pytest.approx(float(getattr(needs, f"{kind.replace(' ', '_')}_K")[0]))
        assert (there_R <= most_R).all()


def test_what_stays_is_what_earlier_units_saved():
    model, network = MODELS["unlike"], NETWORKS["unlike"]
    some = dataclasses.replace(candidates((0, 6), checkpointed=2, zero=0), offload=None)
    costs = model.costs(4)
    there_R = model.of_units(slot(), some)["forward"][0]
    kept_R = np.where((np.arange(8) > 0) & (np.arange(8) < 3), costs.checkpointed_saved_R, costs.saved_R)
    # In front of a recomputed layer the head keeps what that was called with.
    kept_R[0] = costs.checkpointed_saved_R[0]
    assert there_R == pytest.approx(np.cumsum([0.0, *kept_R[:-1]]))
    assert network.num_layers + 2 == len(there_R)


def test_gradients_of_the_first_backward_appear_unit_by_unit():
    model = MODELS["unlike"]
    some = dataclasses.replace(candidates((0, 6), zero=0), offload=None)
    found = model.of_units(slot(), some)
    made_R = found["first backward"][0] - found["backward"][0]
    single_R = model.holdings.table.single_R
    assert made_R == pytest.approx([single_R[unit + 1 :].sum() for unit in range(len(single_R))])
