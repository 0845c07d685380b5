import dataclasses
import itertools

import numpy as np
import pytest

from lightning_mist.cost import StageCandidates, StageCostModel
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.model.spec.model_spec import ParameterSpec
from lightning_mist.plan import OFFLOAD_KINDS, ParameterUse
from lightning_mist.plan.search_space import OFFLOADED
from lightning_mist.tuner import SearchSpace
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.candidates.offload_search import RatioGrid, ordered
from lightning_mist.tuner.space.applied_space import ANYWHERE, apply
from tests.specs import cluster, profile, slot_of, spec, with_splits
from tests.tuner.searches import frontier

MACHINES = {
    "cpu": (cluster(4), profile()),
    "L4": (parse_cluster("1x4xL4"), catalog_profile(parse_cluster("1x4xL4"))),
}
NETWORKS = {
    "alike": spec(4, tied=True),
    "unlike": spec(4, kinds=(0, 1, 1, 0), widths=(1000, 2500)),
    "split": with_splits(spec(4), (2, False)),
}
RATIOS = (0.0, 0.5, 1.0)
EVERY = tuple(OFFLOAD_KINDS)


def make(network, machine, *, limit, host=np.inf, batch=16, offload=OFFLOADED, **search):
    devices, rates = MACHINES[machine]
    model = StageCostModel(NETWORKS[network], rates, devices)
    space = apply(SearchSpace(offload=offload, offload_ratios=RATIOS, **search), NETWORKS[network], 4, batch)
    return IntraStage(model, space, limit, host_limit=host)


def table_of(maker, index, stages, microbatches, bottleneck):
    """The table that a stage shares with others, up to a bottleneck."""
    place = index, stages, ()
    (key, _, _), _ = maker._frontier_key(place, microbatches)
    maker._make_tables({key: (place, None)}, microbatches, bottleneck)
    return maker._tables[key]


def by_hand(maker, index, stages, microbatches):
    """Every point of every place that fits, by evaluating all ratios of all candidates."""
    space, moments = maker.space, device_moments(index, stages, microbatches)
    found, kinds = {}, space.search.offload
    every = list(itertools.product(*(RATIOS if kind in kinds else (0.0,) for kind in OFFLOAD_KINDS)))
    if "checkpoints" not in kinds:
        every = [(*ratios[:-1], ratios[-2]) for ratios in every]
    for shape in space.shapes(microbatches):
        if (shape.devices == space.world_size) != (stages == 1) or shape.devices > space.world_size - stages + 1:
            continue
        slot = maker.slot(index, stages, microbatches, shape)
        memory = maker.model.memory(slot)
        rows = [
            (start, end, kept, zero, *ratios)
            for start, end in itertools.combinations(range(space.num_layers + 1), 2)
            if (start == 0) == (index == 0) and (end == space.num_layers) == (index == stages - 1)
            if index <= start and end <= space.num_layers - (stages - 1 - index)
            for kept in range(end - start + 1)
            for zero in (space.search.zero_stages if shape.data > 1 else (0,))
            for ratios in every
        ]
        if not rows:
            continue
        columns = np.array(rows, dtype=np.float64).T
        numbers = columns[:4].astype(np.int64)
        candidates = StageCandidates(
            start_K=numbers[0],
            end_K=numbers[1],
            checkpointed_K=numbers[2],
            zero_stage_K=numbers[3],
            offload=OffloadCandidates.of_kinds(columns[4:].T),
        )
        needs, seconds = memory.needs(slot, candidates), maker.model.seconds(slot, candidates)
        fits = needs.peaks(moments) <= maker.memory_limit
        fits &= needs.host_bytes(moments) <= maker.host_limit
        for place in np.flatnonzero(fits):
            key = (int(numbers[0, place]), int(numbers[1, place] - numbers[0, place]), shape.devices)
            found.setdefault(key, []).append((seconds.steady_K[place], seconds.boundary_K[place]))
    return found


def check(maker, index, stages, microbatches):
    """That the frontier has what fits and is best, and nothing else; how much of it moves something."""
    choices = frontier(maker, index, stages, microbatches)
    points = by_hand(maker, index, stages, microbatches)
    reached = set()
    for place in range(len(choices)):
        start, layers, devices = (int(getattr(choices, f"{name}_K")[place]) for name in ("start", "layers", "devices"))
        for key in [key for key in points if key[1:] == (layers, devices) and start in (ANYWHERE, key[0])]:
            reached.add(key)
            steady, boundary = choices.steady_K[place], choices.boundary_K[place]
            there = np.array(points[key])
            assert np.isclose(there, [steady, boundary], rtol=1e-12, atol=0).all(axis=1).any()
    assert reached == set(points)
    for (start, layers, devices), there in points.items():
        at = (choices.layers_K == layers) & (choices.devices_K == devices)
        at &= (choices.start_K == start) | (choices.start_K == ANYWHERE)
        for steady, boundary in there:
            slack = 1e-12 * (steady + boundary)
            better = choices.steady_K[at] <= steady + slack
            better &= choices.steady_K[at] + choices.boundary_K[at] <= steady + boundary + slack
            assert better.any()
    return int((choices.offload_KO.max(axis=1, initial=0) > 0).sum())


@pytest.mark.sample
@pytest.mark.combinations
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_frontier_is_that_of_every_ratio(network, machine):
    # From what nothing fits without offload to what everything does.
    moved = 0
    for limit, host in ((400_000, np.inf), (600_000, np.inf), (800_000, 100_000), (1_000_000, np.inf), (1e12, np.inf)):
        maker = make(network, machine, limit=limit, host=host)
        for index, stages in ((0, 1), (0, 2), (1, 3), (1, 2)):
            moved += check(maker, index, stages, 4)
    assert moved


@pytest.mark.parametrize("offload", [("checkpoints",), ("activations", "checkpoints"), ("gradients", *EVERY[3:])])
def test_the_frontier_is_that_of_every_ratio_of_checkpoints(offload):
    own = 0
    for limit, host in ((320_000, np.inf), (740_000, np.inf), (700_000, 30_000), (1_000_000, 100_000)):
        maker = make("alike", "L4", limit=limit, host=host, offload=offload)
        for index, stages in ((0, 1), (0, 2), (1, 3), (1, 2)):
            check(maker, index, stages, 4)
            activations_K, checkpoints_K = frontier(maker, index, stages, 4).offload_KO[:, -2:].T
            own += int((activations_K != checkpoints_K).sum())
    assert own


def displacing():
    """A network whose embedding is tied, next to a larger parameter that nothing else uses."""
    network, size = spec(4, tied=True), 120_000
    slots = (("wte", "extra", (-1,)),)
    use = ParameterUse(name="wte.extra", slots=slots, shape=(size // 4,), dtype="float32", requires_grad=True)
    extra = ParameterSpec(name="wte.extra", numel=size // 4, bytes=size, trainable=True)
    return dataclasses.replace(
        network,
        parameters=(*network.parameters, extra),
        module_map=dataclasses.replace(network.module_map, parameters=(*network.module_map.parameters, use)),
    )


@pytest.mark.parametrize(
    ("ratios", "names"),
    [((0.5, 1.0), EVERY), ((0.5, 0.75), EVERY[3:]), ((0.25, 0.5, 0.75, 1.0), EVERY[3:])],
)
def test_a_tied_parameter_that_a_larger_ratio_leaves_behind_ends_the_order(ratios, names):
    devices, rates = MACHINES["L4"]
    network = displacing()
    space = apply(SearchSpace(offload=OFFLOADED, offload_ratios=ratios), network, 4, 16)
    maker = IntraStage(StageCostModel(network, rates, devices), space, 10**12)
    slot, grid = maker.slot(0, 2, 4, space.shapes(4)[0]), RatioGrid.of(space.search, ratios)
    assert ordered(maker.model, slot, 0, grid) == names
    plain = StageCostModel(spec(4, tied=True), rates, devices)
    assert ordered(plain, slot, 0, grid) == EVERY


@pytest.mark.parametrize(
    ("network", "names"),
    [(spec(4).evenly(), EVERY), (spec(4, tied=True).evenly(), EVERY[3:]), (spec(4), EVERY[3:])],
    ids=["even", "tied", "dealt"],
)
def test_pieces_of_what_moves_grow_with_ratios(network, names):
    devices, rates = MACHINES["L4"]
    model = StageCostModel(network, rates, devices)
    grid = RatioGrid.of(SearchSpace(offload=OFFLOADED), (0.5, 1.0))
    assert ordered(model, slot_of(data_parallel_degree=2), 3, grid) == names


def test_a_unit_moves_no_less_with_a_larger_ratio():
    model = StageCostModel(displacing(), *reversed(MACHINES["L4"]))
    space = apply(SearchSpace(), displacing(), 4, 16)
    memory = model.memory(IntraStage(model, space, 10**12).slot(0, 2, 4, space.shapes(4)[0]))
    table, ratios = memory.holdings.table, np.linspace(0, 1, 101)
    used_PR = np.diff(table.uses_PR, axis=1) > 0
    moved_CR = np.stack([(table.bytes_P * memory.states.offloaded(ratio, trained=False)) @ used_PR for ratio in ratios])
    falls_R = (np.diff(moved_CR, axis=0) < 0).any(axis=0)
    # The unit that only uses the tied parameter has less to fetch; the one it belongs to has not.
    assert falls_R[-1]
    assert not falls_R[:-1].any()
