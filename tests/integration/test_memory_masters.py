"""Predicted peaks with master weights against those of the runtime."""

from statistics import fmean

import pytest
import torch

from lightning_mist.cost import stage_memory
from lightning_mist.errors import InfeasibleError
from lightning_mist.estimate.replay import replay_plan
from lightning_mist.hardware import parse_cluster
from lightning_mist.model import trace_model, with_master_weights
from lightning_mist.plan import OffloadRatios
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.space import USABLE_MEMORY
from tests import zoo
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.integration.metered import measure, measure_peaks
from tests.integration.parity import cast, make_plan, map_of
from tests.integration.test_memory import MEAN, OVER, PLANS, ROWS, UNDER
from tests.integration.test_memory_offload import PLANS as MOVING
from tests.integration.test_memory_offload import RATIOS, REPLAYED
from tests.tiers import tiered

# Of images there are no tokens to cut behind the last layer.
NAMES = [name for name, options in PLANS.items() if options.keys().isdisjoint(("tensor", "lap"))]


def traced_in_16_bits(name):
    """A network in single precision, its batches, and what it costs with masters."""
    module, make_batch = zoo.make(name)
    narrow = zoo.make(name)[0].to(torch.bfloat16)
    batch, call = cast(make_batch(ROWS), torch.bfloat16), zoo.step(narrow)
    optimizer = torch.optim.AdamW(module.parameters())
    spec = trace_model(
        narrow, batch, call=call, module_map=map_of(narrow, batch), optimizer=optimizer, precision="bf16-true"
    )
    return module, make_batch, with_master_weights(spec)


@pytest.fixture(scope="module")
def traced():
    return traced_in_16_bits("vit")


def measured(traced, name):
    module, make_batch, spec = traced
    plan = make_plan(rows=ROWS, **PLANS[name])
    batches = [cast(make_batch(ROWS), torch.bfloat16) for _ in range(plan.world_size)]
    return plan, measure_peaks(module, spec.module_map, plan, batches, master_weights=True)


def test_predicted_equals_measured(traced):
    found = {}
    for name in NAMES:
        plan, peaks = measured(traced, name)
        needs = [memory.peak_bytes for memory in stage_memory(traced[2], plan)]
        replays = [item.peak_bytes for item in replay_plan(traced[2], plan, plain=False)]
        found[name] = [((a - c) / c, (b - c) / c) for a, b, c in zip(needs, replays, peaks, strict=True)]
    errors = [pair[0] for of_plan in found.values() for pair in of_plan]
    assert min(errors) >= -UNDER, found
    assert max(errors) <= OVER, found
    assert fmean(map(abs, errors)) <= MEAN, found
    replayed = [pair[1] for of_plan in found.values() for pair in of_plan]
    assert min(replayed) >= -MEAN, found
    whole = [pair[1] for name, of_plan in found.items() if "behind" not in name for pair in of_plan]
    assert max(whole) <= UNDER, found
    # With chunks behind the last layer 1.25 % too much was told of one stage.
    assert max(replayed) <= 1.3 * UNDER, found


IN_FLIGHT = {
    "recomputed, ZeRO 1": {"layers": [4], "degrees": [2], "parts": 2, "checkpointed": 2, "zero": 1},
    "ZeRO 3, all in flight": {"layers": [4], "degrees": [2], "parts": 2, "zero": 3, "schedule": "gpipe"},
    "pipeline": {"layers": [2, 2], "degrees": [1, 1], "parts": 4},
}


@pytest.mark.usefixtures("ended_streams")
@pytest.mark.parametrize("ratio", tiered([0.3, 1.0], [0.3]))
def test_sums_of_gradients_are_whole_where_activations_are_moved(traced, ratio):
    module, make_batch, spec = traced
    found = {}
    for name, options in IN_FLIGHT.items():
        plan = make_plan(rows=ROWS, offload=OffloadRatios(activations=ratio), **options)
        batches = [cast(make_batch(ROWS), torch.bfloat16) for _ in range(plan.world_size)]
        peaks = measure_peaks(module, spec.module_map, plan, batches, master_weights=True)
        needs, replays = stage_memory(spec, plan), replay_plan(spec, plan)
        found[name] = [
            ((need.peak_bytes - peak) / peak, (replay.peak_bytes - peak) / peak)
            for need, replay, peak in zip(needs, replays, peaks, strict=True)
        ]
    every = [pair for of_plan in found.values() for pair in of_plan]
    assert min(need for need, _ in every) >= -UNDER, found
    assert max(need for need, _ in every) <= OVER, found
    assert all(-MEAN <= replay <= UNDER for _, replay in every), found


@pytest.mark.usefixtures("ended_streams")
@pytest.mark.parametrize("ratios", tiered(RATIOS, RATIOS[1::4]), ids=str)
def test_what_moves_is_counted_with_masters(traced, ratios):
    module, make_batch, spec = traced
    found = {}
    for name, options in MOVING.items():
        plan = make_plan(rows=ROWS, offload=OffloadRatios(**ratios), **options)
        batches = [cast(make_batch(ROWS), torch.bfloat16) for _ in range(plan.world_size)]
        uses = measure(module, spec.module_map, plan, batches, master_weights=True)
        needs, replays = stage_memory(spec, plan), replay_plan(spec, plan, plain=False)
        for stage, (need, replay, use) in enumerate(zip(needs, replays, uses, strict=True)):
            found[name, stage] = (need.peak_bytes / use.device - 1, replay.peak_bytes / use.device - 1)
            # What lies between small parameters in flat buffers is more than of large ones.
            bound = 0.06 if "activations" in ratios else 0.02 if plan.stages[stage].zero_stage else 0.01
            assert abs(need.host_bytes / use.host - 1) <= bound, (name, use.host)
    assert min(need for need, _ in found.values()) >= -UNDER, found
    # Of so small a network what is left on the fullest rank, and what is moved of another, differ by whole matrices.
    assert max(need for need, _ in found.values()) <= (0.12 if 0.3 in ratios.values() else 2 * OVER), found
    assert all(-UNDER <= replay <= REPLAYED for _, replay in found.values()), found


@pytest.fixture(scope="module")
def wide():
    return traced_in_16_bits("nano_wide")


TWINS = (
    ("1xRTX4090", 0.7, {}),
    ("1xRTX4090", 0.6, {}),
    ("1xGH200", 0.55, {}),
    ("1x2xRTX3090", 0.7, {}),
    ("1x2xRTX3090", 0.6, {"num_stages": (1,)}),
    ("1x4xA100-80", 0.5, {"num_stages": (1,), "zero_stages": (3,)}),
)


@pytest.mark.usefixtures("ended_streams")
@pytest.mark.parametrize(("cluster", "share", "ways"), tiered(TWINS, TWINS[1::3]))
def test_a_twin_trains_within_what_it_has_no_room_for(wide, cluster, share, ways):
    """A vocabulary larger than the layers, on devices that cannot hold masters and their state."""
    module, make_batch, spec = wide
    cluster = parse_cluster(cluster)
    planner, nothing = Planner(spec, cluster), SearchSpace(offload=(), **ways)
    asked = {"global_batch_size": ROWS * cluster.world_size}
    whole = planner.tune(**asked, search=nothing).plan
    usable = share * max(stage.peak_bytes for stage in stage_memory(spec, whole))
    asked["memory_limit"] = int(usable / USABLE_MEMORY)
    with pytest.raises(InfeasibleError, match="without offload"):
        planner.tune(**asked, search=nothing)
    plan = planner.tune(**asked, search=SearchSpace(**ways)).plan
    assert any(stage.offload.optimizer > 0 for stage in plan.stages)
    batches = [cast(make_batch(ROWS), torch.bfloat16) for _ in range(plan.world_size)]
    uses = measure(module, spec.module_map, plan, batches, master_weights=True)
    assert max(use.device for use in uses) <= usable
    state = sum(6 * 2 * parameter.numel() for parameter in module.parameters())
    assert sum(use.host * len(stage.devices) for use, stage in zip(uses, plan.stages, strict=True)) > state / 2
