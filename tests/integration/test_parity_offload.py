"""What is kept in host memory changes nothing: curves are those of a single process, whatever is moved."""

import copy
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import pytest
import torch

from benchmarks.parity.cell import CURVE_STEPS, compare_curves, compare_gradients, on_all_ranks, subject, train_batch
from benchmarks.parity.plans import OFFLOADING, Group, Layout, make_plan
from benchmarks.parity.table import rounds_as_one_process
from lightning_mist.devices import HostOps
from lightning_mist.optimizers import ENTRYWISE
from lightning_mist.plan import OffloadRatios
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.host_memory import CopyStreams, HostPlace
from lightning_mist.runtime.offload import OffloadedState
from lightning_mist.strategy.training.engine import Engine
from tests import zoo
from tests.devices.happens_before import HappensBefore
from tests.devices.late_host import LateHost
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.integration.parity import make_optimizer, map_of
from tests.runtime.offload.weak import weak_copies
from tests.tiers import tiered

FIRST = ("one device, some", "parameters, ZeRO 1", "parameters, ZeRO 3", "activations, pipeline", "activations, ZeRO 2")
FIRST += ("checkpoints", "checkpoints, ZeRO 2", "checkpoints, pipeline")
"""Plans of the first tier."""

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("ended_streams"),
]

STATE = OffloadRatios(optimizer=1.0)
SOME = OffloadRatios(optimizer=0.3)
KEPT = OffloadRatios(activations=1.0)
SOME_KEPT = OffloadRatios(activations=0.3)
VALUES = OffloadRatios(parameters=1.0)
SOME_VALUES = OffloadRatios(parameters=0.3, optimizer=0.3)
SOME_OF_ALL = OffloadRatios(parameters=0.3, gradients=0.3, optimizer=0.3, activations=0.3)
ALL = OffloadRatios(parameters=1.0, gradients=1.0, optimizer=1.0, activations=1.0)
SUMS = OffloadRatios(gradients=1.0)
SOME_SUMS = OffloadRatios(gradients=0.3, optimizer=0.3)
BOTH = OffloadRatios(optimizer=1.0, activations=1.0)
INPUTS = OffloadRatios(checkpoints=1.0)
MORE_INPUTS = OffloadRatios(activations=0.3, checkpoints=1.0, optimizer=0.3)
NO_INPUTS = OffloadRatios(activations=1.0, checkpoints=0.0)

PLANS = {
    "one device": Layout(groups=(Group(offload=STATE),)),
    "one device, some": Layout(groups=(Group(offload=SOME, checkpointed=2),), parts=2),
    "data parallel": Layout(groups=(Group(dp=2, offload=STATE),)),
    "ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=SOME),)),
    "ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=STATE),), parts=2),
    "ZeRO 3": Layout(groups=(Group(dp=3, zero=3, offload=STATE),)),
    "tensor parallel": Layout(groups=(Group(tp=2, offload=STATE),)),
    "pipeline": Layout(groups=(Group(dp=2, offload=STATE), Group(dp=2, zero=1, offload=SOME))),
    "chunks": Layout(groups=(Group(offload=STATE),) * 2, schedule="interleaved-1f1b", chunks=2),
    "parameters": Layout(groups=(Group(offload=VALUES),)),
    "parameters, some, some recomputed": Layout(groups=(Group(offload=SOME_VALUES, checkpointed=2),), parts=2),
    "parameters, ZeRO 0": Layout(groups=(Group(dp=2, offload=VALUES),)),
    "parameters, ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=SOME_VALUES),)),
    "parameters, ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=VALUES),), parts=2),
    "parameters, ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=ALL),), parts=2),
    "parameters, some, ZeRO 3": Layout(groups=(Group(dp=3, zero=3, offload=SOME_VALUES),)),
    "parameters, tensor parallel": Layout(groups=(Group(tp=2, offload=ALL),)),
    "parameters, pipeline": Layout(groups=(Group(dp=2, offload=VALUES), Group(dp=2, zero=1, offload=ALL)), parts=2),
    "parameters, chunks": Layout(groups=(Group(offload=ALL),) * 2, schedule="interleaved-1f1b", chunks=2),
    "parameters, zero bubble": Layout(groups=(Group(offload=ALL),) * 2, schedule="zb-h1", parts=2),
    "gradients": Layout(groups=(Group(offload=SUMS),), parts=2),
    "gradients, some, some recomputed": Layout(groups=(Group(offload=SOME_SUMS, checkpointed=2),), parts=4),
    "gradients, ZeRO 0": Layout(groups=(Group(dp=2, offload=SUMS),), parts=2),
    "gradients, ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=SOME_SUMS),), parts=2),
    "gradients, ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=SUMS),), parts=2),
    "gradients, ZeRO 3": Layout(groups=(Group(dp=3, zero=3, offload=SOME_SUMS),), parts=2),
    "gradients, tensor parallel": Layout(groups=(Group(tp=2, offload=SUMS),), parts=2),
    "gradients, pipeline": Layout(groups=(Group(dp=2, offload=SUMS), Group(dp=2, zero=1, offload=ALL)), parts=2),
    "gradients, chunks": Layout(groups=(Group(offload=SUMS),) * 2, schedule="interleaved-1f1b", chunks=2),
    "gradients, zero bubble": Layout(
        groups=(Group(offload=SUMS), Group(dp=2, zero=2, offload=ALL)), schedule="zb-h1", parts=2
    ),
    "activations": Layout(groups=(Group(offload=KEPT),)),
    "activations, some, some recomputed": Layout(groups=(Group(offload=SOME_KEPT, checkpointed=2),), parts=2),
    "activations, ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=SOME_KEPT),), parts=2),
    "activations, ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=KEPT, checkpointed=1),), parts=2),
    "activations, tensor parallel": Layout(groups=(Group(tp=2, offload=BOTH),)),
    "activations, pipeline": Layout(groups=(Group(dp=2, offload=BOTH), Group(dp=2, zero=1, offload=KEPT)), parts=2),
    "activations, chunks": Layout(groups=(Group(offload=BOTH),) * 2, schedule="interleaved-1f1b", chunks=2),
    "activations, zero bubble": Layout(groups=(Group(offload=KEPT),) * 2, schedule="zb-h1", parts=2),
    "activations, no checkpoints": Layout(groups=(Group(offload=NO_INPUTS, checkpointed=2),), parts=2),
    "checkpoints": Layout(groups=(Group(offload=INPUTS, checkpointed=1),), parts=2),
    "checkpoints, all recomputed": Layout(groups=(Group(offload=INPUTS, checkpointed=9),), parts=2),
    "checkpoints, ZeRO 2": Layout(groups=(Group(dp=2, zero=2, offload=MORE_INPUTS, checkpointed=1),), parts=2),
    "checkpoints, ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=MORE_INPUTS, checkpointed=2),)),
    "checkpoints, tensor parallel": Layout(groups=(Group(tp=2, offload=MORE_INPUTS, checkpointed=1),)),
    "checkpoints, pipeline": Layout(
        groups=(Group(dp=2, offload=INPUTS, checkpointed=1), Group(dp=2, zero=1, offload=MORE_INPUTS, checkpointed=1)),
        parts=2,
    ),
    "checkpoints, chunks": Layout(
        groups=(Group(offload=MORE_INPUTS, checkpointed=1),) * 2, schedule="interleaved-1f1b", chunks=2
    ),
    "checkpoints, zero bubble": Layout(groups=(Group(offload=INPUTS, checkpointed=1),) * 2, schedule="zb-h1", parts=2),
}


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["nano_even", "lora_llama", "blocks_alone"])
@pytest.mark.parametrize("label", tiered(PLANS, FIRST))
def test_curves(name, label):
    model = subject(name, torch.float64)
    plan = make_plan(PLANS[label], len(model.module_map.blocks))
    outcome = compare_curves(model, plan)
    assert outcome.differing == ""
    assert outcome.gradient < 1e-12


def with_masters(in_16_bits, name="nano_even"):
    types = (torch.bfloat16, torch.float32) if in_16_bits else (torch.float32, torch.float64)
    return subject(name, types[0], masters=types[1])


@pytest.mark.parametrize("label", tiered({**PLANS, **OFFLOADING}, [*FIRST, *list(OFFLOADING)[::5]]))
def test_curves_with_masters(label):
    """Where ranks round the sums that one process rounds, to the bit in 16 bits; else to rounding in 32."""
    layout = {**PLANS, **OFFLOADING}[label]
    # Norms of even pieces add up in another order, by which gradients are clipped.
    in_pieces = any(group.zero and group.dp > 1 for group in layout.groups)
    is_same = rounds_as_one_process(layout) and not in_pieces
    model = with_masters(is_same)
    outcome = compare_curves(model, make_plan(layout, len(model.module_map.blocks)))
    assert outcome.differing == ""
    assert not is_same or outcome.loss == outcome.gradient == 0.0


@pytest.mark.parametrize("label", tiered(OFFLOADING, [name for name in OFFLOADING if "ZeRO" in name][:6:2]))
def test_gradients_of_several_batches(label):
    model = subject("nano_even", torch.float64)
    outcome = compare_gradients(model, make_plan(OFFLOADING[label], len(model.module_map.blocks)))
    assert outcome.differing == ""


@pytest.mark.parametrize("label", tiered(PLANS, ["ZeRO 1", "parameters, ZeRO 3"]))
def test_curves_with_state_in_files(label, tmp_path):
    model = subject("nano_even", torch.float64)
    in_files = partial(Engine, host=HostPlace(directory=tmp_path))
    with mock.patch("benchmarks.parity.cell.Engine", in_files):
        outcome = compare_curves(model, make_plan(PLANS[label], len(model.module_map.blocks)))
    assert outcome.differing == ""


DELAYED = {
    "one device": Layout(groups=(Group(offload=ALL, checkpointed=1),), parts=2),
    "some of all": Layout(groups=(Group(offload=SOME_OF_ALL),), parts=2),
    "pipeline": Layout(groups=(Group(offload=ALL), Group(zero=1, offload=SOME_OF_ALL)), parts=2),
    "ZeRO 1": Layout(groups=(Group(dp=2, zero=1, offload=SOME_OF_ALL),), parts=2),
    "ZeRO 3": Layout(groups=(Group(dp=2, zero=3, offload=ALL),)),
}


@cache
def undelayed(label, has_masters):
    return trained(DELAYED[label], HostOps(), has_masters)


def clipped_steps(model, layout, steps, device="cpu"):
    """Losses and values of every rank after clipped steps, and bytes that came from host memory."""

    def work(engine):
        optimizer = make_optimizer(engine.module)
        engine.take_optimizer(optimizer)
        engine.hollow()
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(train_batch(engine, model.batches[step % 2][engine.rank]))
            engine.clip_by_norm(optimizer, 0.05)
            optimizer.step()
            complete(engine.executor.gather_parameters())
        values = {name: value.to(device) for name, value in engine.module_values().items()}
        return losses, values, engine.executor.streams.loaded_bytes

    return on_all_ranks(model, make_plan(layout, len(model.module_map.blocks)), work)


def trained(layout, ops, has_masters=False, model=None):
    model = model or (with_masters(in_16_bits=True) if has_masters else subject("nano_even", torch.float64))
    with mock.patch("lightning_mist.runtime.executor.ops_of", return_value=ops), weak_copies():
        return [rank[:2] for rank in clipped_steps(model, layout, 3)]


@pytest.mark.parametrize("label", tiered(DELAYED, ["some of all", "pipeline"]))
@pytest.mark.parametrize("first_seed", range(0, 40, 5))
def test_delays_change_no_bit(label, first_seed):
    for seed in range(first_seed, first_seed + 5):
        has_masters = seed % 2 == 1
        for (losses, values), (wanted, expected) in zip(
            trained(DELAYED[label], LateHost(seed=seed), has_masters), undelayed(label, has_masters), strict=True
        ):
            assert all(map(torch.equal, losses, wanted))
            assert values.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in values.items())


@pytest.mark.parametrize("label", tiered(PLANS, ["gradients, ZeRO 1", "parameters, pipeline", "activations, ZeRO 2"]))
@pytest.mark.parametrize("has_masters", [False, True])
def test_nothing_but_events_orders_the_copies(label, has_masters):
    races = HappensBefore()
    trained(PLANS[label], LateHost(seed=1, observer=races), has_masters)
    assert races.races == []


IN_PARTS = {
    "one device": Layout(groups=(Group(offload=STATE),)),
    "all": Layout(groups=(Group(offload=ALL),), parts=2),
    "data parallel": Layout(groups=(Group(dp=2, offload=ALL),)),
    "tensor parallel": Layout(groups=(Group(tp=2, offload=ALL),)),
    "pipeline": Layout(groups=(Group(offload=ALL), Group(offload=ALL)), parts=2),
}
"""Plans under which a large vocabulary's state passes through buffers of layers' size."""


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("label", tiered(IN_PARTS, ["all", "data parallel"]))
def test_a_vocabulary_passes_through_the_buffers_of_layers(label, has_masters):
    model = with_masters(rounds_as_one_process(IN_PARTS[label]), "nano_wide") if has_masters else None
    model, layout = model or subject("nano_wide", torch.float64), IN_PARTS[label]
    plan = make_plan(layout, len(model.module_map.blocks))
    update = OffloadedState._update_part
    with mock.patch.object(OffloadedState, "_update_part", autospec=True, side_effect=update) as parts:
        outcome = compare_curves(model, plan)
    assert outcome.differing == ""
    assert parts.call_count >= 2 * 2 * (CURVE_STEPS - 1)
    if label == "all" and has_masters:
        races = HappensBefore(line=64)
        delayed = trained(layout, LateHost(seed=1, observer=races), model=model)
        assert races.races == []
        for (losses, values), (wanted, expected) in zip(delayed, trained(layout, HostOps(), model=model), strict=True):
            assert all(map(torch.equal, losses, wanted))
            assert all(torch.equal(value, expected[name]) for name, value in values.items())


@pytest.mark.parametrize("name", tiered(sorted(ENTRYWISE), ["AdamW", "NAdam", "Rprop"]))
@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_every_optimizer_updates_parts_to_the_bit(name, kernel):
    if kernel.get("fused") and name not in ("SGD", "Adam", "AdamW", "Adagrad"):
        pytest.skip("has no fused kernel")
    options = {**kernel, **({"momentum": 0.9} if name == "SGD" else {})}
    model = with_masters(in_16_bits=True, name="nano_wide")

    def optimize(module):
        return getattr(torch.optim, name)([p for p in module.parameters() if p.requires_grad], lr=1e-3, **options)

    outcome = compare_curves(model, make_plan(IN_PARTS["all"], len(model.module_map.blocks)), optimize)
    assert (outcome.loss, outcome.gradient) == (0.0, 0.0)


class Scaled(zoo.Nano):
    """Has a number, and a vector that nothing trains, beside its vocabulary."""

    def __init__(self):
        super().__init__(layers=2, tied=False, vocabulary=514)
        self.scale, self.spare = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(96))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale


@pytest.mark.parametrize("has_masters", [False, True])
def test_what_has_no_parts_is_updated_beside_a_vocabulary_that_passes_in_parts(has_masters):
    torch.manual_seed(0)
    known = with_masters(in_16_bits=True, name="nano_wide") if has_masters else subject("nano_wide", torch.float64)
    narrow = Scaled().to(known.dtype)
    module = copy.deepcopy(narrow).to(next(known.module.parameters()).dtype)
    model = replace(known, module=module, module_map=map_of(narrow, known.batches[0][0]))
    update = OffloadedState._update_part
    with mock.patch.object(OffloadedState, "_update_part", autospec=True, side_effect=update) as parts:
        assert compare_curves(model, make_plan(IN_PARTS["all"], 2)).differing == ""
    assert parts.call_count >= 2 * 2 * (CURVE_STEPS - 1)


def steps_from(model, layout, steps, state=None):
    """Values and optimizer state of the whole model after steps, from a state on if one is given."""

    def work(engine):
        optimizer = make_optimizer(engine.module)
        engine.take_optimizer(optimizer)
        engine.hollow()
        if state is not None:
            engine.owned(optimizer).load(copy.deepcopy(state))
        for step in range(steps):
            optimizer.zero_grad()
            train_batch(engine, model.batches[step % 2][engine.rank])
            optimizer.step()
            complete(engine.executor.gather_parameters())
        return engine.module_values(), engine.owned(optimizer).state()

    return on_all_ranks(model, make_plan(layout, len(model.module_map.blocks)), work)[0]


def test_state_that_passed_in_parts_is_saved_and_loaded_whole():
    model = with_masters(in_16_bits=True, name="nano_wide")
    _, state = steps_from(model, Layout(parts=2), 2)
    (wanted, expected), (values, found) = (
        steps_from(model, layout, 3, state) for layout in (Layout(parts=2), IN_PARTS["all"])
    )
    assert all(torch.equal(values[name], value) for name, value in wanted.items())
    assert found["param_groups"] == expected["param_groups"]
    for number, entry in expected["state"].items():
        assert list(found["state"][number]) == list(entry)
        assert all(torch.equal(found["state"][number][key], value) for key, value in entry.items())
        assert float(entry["step"]) == 5.0


class AtOnce(LateHost):
    """Does what is launched on a stream at once: where nothing waits, memory that is freed is not copied to later."""

    def launch(self, work, stream=None, **uses):
        super().launch(lambda: None, stream, **uses)
        work()


BROKEN = {
    "what arrives is not waited for": ("wait", lambda streams, event: None),
    "memory is filled before it is free": (
        "load",
        lambda streams, targets, sources, after=(): streams._copy(streams._load, targets, sources, ()),
    ),
    "what leaves is not there yet": (
        "store",
        lambda streams, targets, sources: streams._copy(streams._store, targets, sources, ()),
    ),
}


@pytest.mark.parametrize("label", tiered(["one device", "parameters", "gradients", "activations"], ["gradients"]))
@pytest.mark.parametrize("what", BROKEN)
def test_every_wait_is_needed(what, label):
    name, broken = BROKEN[what]
    races = HappensBefore()
    with mock.patch.object(CopyStreams, name, broken):
        trained(PLANS[label], AtOnce(observer=races))
    assert races.races
