"""Rows of units add up to what the cost model says of the passes that they are in."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.time.overlap import FREE
from lightning_mist.hardware.profile import ends_together, seconds_together, speed_table
from lightning_mist.plan import ZeroStage
from tests.cost.time.test_offload_seconds import SLOWED, Walk, candidates, machine, network, ratios, slot
from tests.specs import cluster
from tests.tiers import examples


def rows_of(passes, name):
    values = passes.get(name, ())
    return [values[index : index + 6] for index in range(0, len(values), 6)]


def seconds(passes, name):
    return sum(count * each for count, each, *_ in rows_of(passes, name))


@given(loads=st.lists(st.tuples(*[st.floats(0, 10)] * 4), min_size=1, max_size=5), slowed=st.booleans())
@settings(max_examples=examples(30))
def test_loads_are_done_one_after_another_and_the_last_one_with_all(loads, slowed):
    loads_K, speeds = np.array(loads).T, speed_table(SLOWED if slowed else FREE, False)
    ends_K = ends_together(loads_K, speeds)
    assert ends_K.max(axis=0) == pytest.approx(seconds_together(loads_K, speeds))
    # Nothing is done before it could be alone, and what is nothing never is under way.
    assert (ends_K >= loads_K * (1 - 1e-12)).all()
    assert (ends_K[loads_K == 0] == 0).all()
    if not slowed:
        assert ends_K == pytest.approx(loads_K)


@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (0, 1), (2, 3), (3, 4)])
@given(
    zero=st.integers(0, 3),
    ranks=st.sampled_from([1, 2]),
    checkpointed=st.integers(0, 4),
    given_ratios=st.tuples(ratios, ratios, ratios, ratios).filter(any),
    down=st.sampled_from([1e7, 1e9]),
    slowed=st.booleans(),
)
@settings(max_examples=examples(10))
def test_with_copies_passes_take_what_was_priced(layers, zero, ranks, checkpointed, given_ratios, down, slowed):
    some = candidates(
        layers,
        checkpointed=min(checkpointed, layers[1] - layers[0]),
        zero=zero,
        **dict(zip(("parameters", "gradients", "optimizer", "activations"), given_ratios, strict=True)),
    )
    hardware = machine(to_device=down, to_host=1.5 * down, interference=SLOWED if slowed else FREE)
    walk = Walk(network(), hardware, slot(data_parallel_degree=ranks), some, SLOWED if slowed else FREE)
    passes = walk.model.channels(walk.slot, walk.some)
    wanted = {
        "first forward": walk.forward(True, True, away=True),
        "last backward": walk.backward(True, True),
        "forward": walk.forward(True, False),
        "backward": walk.backward(True, False),
    }
    for name, expected in wanted.items():
        if name in passes:
            assert seconds(passes, name) == pytest.approx(expected)
    assert ("first forward" in passes) == any(given_ratios[:3])
    for name in passes:
        for _, each, *busy, waited in rows_of(passes, name):
            assert max(busy) <= each - waited + 1e-12


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("checkpointed", [0, 3])
@pytest.mark.parametrize("interference", [FREE, SLOWED], ids=["free", "slowed"])
def test_collectives_of_units_take_what_was_priced(zero, checkpointed, interference):
    model = StageCostModel(network(6), machine(interference=interference), cluster(2, kind="cuda"))
    place = slot(data_parallel_degree=2)
    some = dataclasses.replace(candidates((0, 6), checkpointed=checkpointed, zero=zero), offload=None)
    # Of so many microbatches what happens once per batch is nothing.
    found = model.seconds(dataclasses.replace(place, num_microbatches=10**9), some)
    passes = model.channels(place, some)
    regions = model.region_seconds(place.rows)
    computed = regions.forward_R.sum() + regions.backward_R.sum()
    computed += regions.recompute_R[1 : 1 + checkpointed].sum()
    forward = seconds(passes, "forward") or regions.forward_R.sum()
    assert forward + seconds(passes, "backward") == pytest.approx(
        float(computed + found.unshard_K[0] + found.scatter_K[0])
    )
    assert ("forward" in passes) == (zero == ZeroStage.PARAMETERS)
    assert "reduce" not in passes


def test_averaging_that_hides_in_the_last_backward():
    place = slot(data_parallel_degree=2)
    some = dataclasses.replace(candidates(zero=1), offload=None)
    large = network(parameter_bytes=40_000_000)
    model = StageCostModel(large, machine(link=1e11, interference=FREE), cluster(2, kind="cuda"))
    found = model.seconds(place, some)
    (hidden,) = model.channels(place, some)["reduce"]
    everything = sum(item.bytes for item in large.parameters)
    assert hidden + found.reduce_K[0] == pytest.approx(everything / 1e11, rel=0.1)
    assert 0 < hidden < found.backward_K[0]
    # Unless the network is as small as a bucket, of which the last one never hides.
    small = StageCostModel(network(), machine(interference=FREE), cluster(2, kind="cuda"))
    assert small.channels(place, some) == {}


def test_units_that_are_alike_are_told_once():
    some = candidates((0, 40), activations=1.0)
    passes = StageCostModel(network(40), machine(interference=FREE), cluster(1, kind="cuda")).channels(slot(), some)
    counts = [count for count, *_ in rows_of(passes, "forward")]
    assert sum(counts) in (42, 43)  # head, layers, tail, and what the last one moves behind its forward


def test_cores_that_do_everything_do_nothing_beside():
    model = StageCostModel(network(), machine(), cluster(2, kind="cpu"))
    assert model.channels(slot(data_parallel_degree=2), candidates(zero=3, parameters=1.0)) == {}


def test_an_update_that_waits_for_nobody_has_rows_of_its_own():
    looked_at = network(exclusions=[("sharded_gradients", "a hook reads gradients")])
    model = StageCostModel(looked_at, machine(interference=FREE), cluster(1, kind="cuda"))
    some = candidates(zero=0, optimizer=1.0, parameters=0.5)
    found, passes = model.seconds(slot(), some), model.channels(slot(), some)
    assert "first forward" not in passes
    assert seconds(passes, "update") == pytest.approx(float(found.update_K[0] + found.update_copies_K[0]))
