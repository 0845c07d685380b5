"""How much of what plans copy between device and host is copied while the device computes: simulated.

python -m benchmarks.planner.hidden_copies
"""

from dataclasses import replace

import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.cost.candidates import OffloadCandidates, slots_of
from lightning_mist.cost.channels import copy_rates
from lightning_mist.cost.offload_loads import BEFORE, Beforehand, CopyPlace, Loads, Moving, loads_of
from lightning_mist.plan import OffloadRatios, Plan
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.copies import CopyTimes, run_copies
from lightning_mist.schedule.lower import lower
from lightning_mist.schedule.stage_units import batch_lines

KINDS = ("parameters", "gradients", "optimizer", "activations")


def steady_times(model: StageCostModel, plan: Plan, group: int = 0, batches: int = 3) -> CopyTimes:
    """A group of devices of a plan on the clock for some batches, with the seconds and bytes of the cost model.

    Transfers between stages take no time.
    """
    stage = plan.stages[group]
    slot, some = slots_of(plan, model.cluster)[group]
    of_all, of_one = _loads(model, plan, group, KINDS), {kind: _loads(model, plan, group, (kind,)) for kind in KINDS}
    whole = model.seconds(slot, replace(some, offload=None))
    again = range(stage.layers[0], stage.layers[0] + stage.checkpointing.layers)
    units = [*([HEAD] if group == 0 else []), *range(*stage.layers), *([TAIL] if group + 1 == plan.num_stages else [])]
    layers = model.spec.num_layers

    def at(loads: Loads, name: str, unit: int) -> float:
        region = {HEAD: 0, TAIL: layers + 1}.get(unit, unit + 1)
        return float(loads[name][0, BEFORE + region])

    def computed(kind: ActionKind, unit: int) -> float:
        if kind is ActionKind.FORWARD:
            return at(of_all, "forward", unit)
        return at(of_all, "backward", unit) + (at(of_all, "forward", unit) if unit in again else 0.0)

    once = {
        ActionKind.REDUCE_GRADIENTS: float(whole.reduce_K[0]),
        ActionKind.GATHER_PARAMETERS: float(whole.gather_K[0]),
    }

    def seconds(action: Action) -> float:
        kind, unit = action.kind, action.unit
        if kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            return sum(computed(kind, each) for each in (units if unit is None else [unit]))
        if unit is None:
            return once.get(kind, 0.0)
        if kind is ActionKind.REDUCE_GRADIENTS:
            return at(of_all, "scatter", unit) + at(of_all, "reduce", unit)
        names = {ActionKind.UPDATE: "update", ActionKind.UNSHARD: "unshard", ActionKind.GATHER_PARAMETERS: "gather"}
        return at(of_all, names[kind], unit)

    rates = copy_rates(model.profile, model.cluster)

    def nbytes(action: Action, is_final: bool) -> float:
        kind, unit = action.kind, action.unit or 0
        kept = "kept" if unit in again else "saved"
        name, moved = {
            ActionKind.UNSHARD: ("parameters_in", "parameters"),
            ActionKind.LOAD_PARAMETERS: ("state_out", "parameters"),
            ActionKind.STORE_PARAMETERS: ("state_out", "parameters"),
            ActionKind.LOAD_OPTIMIZER_STATE: ("state_in", "optimizer"),
            ActionKind.STORE_OPTIMIZER_STATE: ("state_out", "optimizer"),
            ActionKind.LOAD_GRADIENTS: ("state_in" if is_final else "gradients_in", "gradients"),
            ActionKind.STORE_GRADIENTS: ("gradients_out", "gradients"),
            ActionKind.LOAD_ACTIVATIONS: (f"{kept}_in", "activations"),
            ActionKind.STORE_ACTIVATIONS: (f"{kept}_out", "activations"),
        }[kind]
        return at(of_one[moved], name, unit) * (rates.to_device if name.endswith("in") else rates.to_host)

    lines = batch_lines(plan, model.spec.module_map, group, lower(plan, tied=False)[group])
    return run_copies([lines] * batches, seconds, nbytes, (rates.to_device, rates.to_host))


def _loads(model: StageCostModel, plan: Plan, group: int, kinds: tuple[str, ...]) -> Loads:
    slot, some = slots_of(plan, model.cluster)[group]
    ratios = OffloadRatios(**{kind: getattr(plan.stages[group].offload, kind) for kind in kinds})
    _, known, _ = model._without_copies(slot, some)
    moving = Moving(
        places=[CopyPlace(memory=model.memory(slot), slot=slot, compute=known.compute, units=known.units)],
        place_K=np.zeros(1, dtype=np.int64),
        candidates=replace(some, offload=OffloadCandidates.of(ratios)),
        before=Beforehand(update_K=known.update_K, reduce_K=known.reduce_K, gather_K=known.gather_K),
    )
    return loads_of(moving, copy_rates(model.profile, model.cluster))[0]
