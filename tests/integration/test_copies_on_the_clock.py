"""The clock's copies are those of the executor: the same ones, of as many bytes, in the same order."""

from dataclasses import replace
from itertools import groupby

import pytest
import torch

from benchmarks.parity.cell import on_all_ranks, subject, train_batch
from benchmarks.parity.plans import make_plan
from benchmarks.planner.copies_clock import batch_lines, run_copies
from lightning_mist.plan import Exclusion, ZeroStage
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.schedule import ActionKind
from lightning_mist.schedule.flats import stage_flats
from lightning_mist.schedule.stage_units import moved_parameters, shard_units, updated_units
from tests.devices.streams import ended_streams  # noqa: F401 - a fixture
from tests.integration.parity import make_optimizer
from tests.integration.test_parity_offload import FIRST, PLANS
from tests.tiers import tiered

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.usefixtures("ended_streams"),
]

STEPS = 4
"""In the first there is no update, in the second the optimizer makes its state."""


def recorded(engine, batches):
    """What streams copied in every batch, by the action that began it."""
    executor, found, now = engine.executor, [], []
    optimizer = make_optimizer(engine.module)
    engine.take_optimizer(optimizer)
    engine.hollow()
    streams, walk = executor.streams, executor._runner
    copy = streams._copy

    def copied(stream, targets, sources, after):
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in sources)
        found[-1].append((now[-1], stream is streams._load, nbytes))
        return copy(stream, targets, sources, after)

    def noted(perform):
        def performed(action):
            now.append(action)
            perform(action)
            now.pop()

        return performed

    streams._copy = copied
    actors = [(walk, "_perform"), (executor._update, "perform")]
    actors = [(actor, name) for actor, name in actors if actor is not None]
    for actor, name in actors:
        setattr(actor, name, noted(getattr(actor, name)))
    for step in range(STEPS):
        found.append([])
        optimizer.zero_grad()
        train_batch(engine, batches[step % 2][engine.rank])
        optimizer.step()
        complete(engine.executor.gather_parameters())
    copies = list(found[-1])
    executor.flush()
    del streams._copy
    for actor, name in actors:
        delattr(actor, name)
    # What one action copies in several pieces is one copy on the clock, and nothing is none.
    groups = groupby((item for item in copies if item[2] > 0), key=lambda item: item[:2])
    return [(*same, sum(nbytes for *_, nbytes in items)) for same, items in groups]


def bytes_of(engine, module_map):
    """Bytes that each action of a rank copies; of activations, which a map does not know, some."""
    mesh = engine.executor.mesh
    plan, stage = mesh.plan, mesh.plan.stages[mesh.stage]
    sizes = {name: p.numel() * p.element_size() for name, p in engine.stages.parameters.items()}
    mine = {item.name for item in mesh.owned}
    here = {item.name for item in mesh.held if not mesh.is_sharded or item.owner(mesh.stage) == mesh.peer_index}
    state, values, sums = moved_parameters(plan, module_map, mesh.stage).values()
    flats = stage_flats(plan, module_map, mesh.stage)
    in_flats = {name for flat in flats for name in flat.names}
    spans = {
        name: sizes[name] // flat.sizes[index] * (high - low)
        for flat in flats
        for index, name in enumerate(flat.names)
        for low, high in [flat.span(index, mesh.shard_index)]
    }
    stages = plan.chunks(mesh.stage)
    units = {(at, unit.unit): unit for at in stages for unit in shard_units(module_map, plan.bounds, at)}
    updated = updated_units(plan, module_map, mesh.stage)

    def total(names):
        return sum(sizes[name] for name in names)

    def pieces(names):
        return sum(8 * flat.piece for flat in flats if flat.names[0] in names)

    def nbytes(action, is_final):
        key = action.stage, action.unit
        kind = action.kind
        if kind is ActionKind.UNSHARD:
            names = values & set(units[key].names)
            if stage.zero_stage < ZeroStage.PARAMETERS:
                return total(names)
            return total(names & here - in_flats) + pieces(names)
        if kind in (ActionKind.LOAD_PARAMETERS, ActionKind.STORE_PARAMETERS):
            names = values & set(updated[key])
            if stage.zero_stage < ZeroStage.PARAMETERS:
                return total(names)
            return total(names & mine - in_flats) + pieces(names)
        if kind in (ActionKind.LOAD_OPTIMIZER_STATE, ActionKind.STORE_OPTIMIZER_STATE):
            names = state & set(updated[key]) & mine
            return 2 * (total(names - in_flats) + sum(spans[name] for name in names & in_flats))
        if kind in (ActionKind.LOAD_GRADIENTS, ActionKind.STORE_GRADIENTS):
            names = sums & set(units[key].reduced)
            is_shared = is_final or stage.zero_stage >= ZeroStage.GRADIENTS
            in_pieces = pieces(names) * (1 if is_shared else len(mesh.shard_peers))
            names = (names & mine if is_shared else names) - in_flats
            # With a number for each that says which ranks had one.
            return total(names) + 8 * len(names) * (len(mesh.peers) > 1) + in_pieces
        return 1.0

    return nbytes


@pytest.mark.combinations
@pytest.mark.parametrize("name", ["nano_even", "lora_llama"])
@pytest.mark.parametrize("label", tiered(PLANS, FIRST))
def test_copies_are_those_of_the_executor(name, label):
    compare(subject(name, torch.float64), PLANS[label])


@pytest.mark.parametrize("label", ["one device", "parameters", "parameters, ZeRO 0", "gradients, chunks"])
def test_so_they_are_where_nothing_waits_for_the_next_batch(label):
    model = subject("nano_even", torch.float64)
    looked_at = (Exclusion(feature="sharded_gradients", reason="a hook reads gradients"),)
    compare(replace(model, module_map=replace(model.module_map, exclusions=looked_at)), PLANS[label])


def compare(model, layout):
    plan = make_plan(layout, len(model.module_map.blocks))

    def work(engine):
        found, executor = recorded(engine, model.batches), engine.executor
        lines = batch_lines(plan, model.module_map, executor.mesh.stage, executor.actions)
        times = run_copies([lines, lines], lambda action: 1.0, bytes_of(engine, model.module_map), (1.0, 1.0))
        return found, times.copies[-1]

    ranks = on_all_ranks(model, plan, work)
    assert any(found for found, _ in ranks)
    for found, copies in ranks:
        assert [item[:2] for item in found] == [(copy.action, copy.is_load) for copy in copies]
        for (action, _, nbytes), copy in zip(found, copies, strict=True):
            if action.microbatch is None:
                # Parameters lie in one piece, each where vector loads may begin.
                assert 0 <= nbytes - copy.nbytes <= 16 * len(model.module_map.parameters), action
