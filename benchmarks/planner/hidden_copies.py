"""How much of what plans copy between device and host is copied while the device computes: simulated.

python -m benchmarks.planner.hidden_copies

The plan that is recommended for one device, with all kinds of state allowed in host memory, on a clock: the lists that
the runtime would run, with the seconds and bytes of the cost model. Nothing here was measured on a card.
"""

import argparse
from dataclasses import replace

from benchmarks.planner.apart import PRECISION, spec_of
from benchmarks.planner.copies_clock import CopyTimes, Costs, batch_lines, run_copies
from benchmarks.record import Sample, make_record, write_record
from lightning_mist.cost import StageCostModel
from lightning_mist.cost.inputs.candidates import OffloadCandidates, slots_of
from lightning_mist.cost.time.offload_loads import BEFORE, Loads, loads_of
from lightning_mist.cost.time.overlap import copy_rates, interference_of
from lightning_mist.hardware import catalog_profile, parse_cluster
from lightning_mist.model.presets.named_models import PRESETS
from lightning_mist.plan import OffloadRatios, Plan, SearchSpace
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, TAIL
from lightning_mist.schedule.lowering import lower
from lightning_mist.tuner import tune

CASES = [
    (f"{family}-{size}", device)
    for size, devices in (("7b", ("L4", "A100-40")), ("13b", ("L4", "A100-40", "A100-80")))
    for family in ("gpt3", "llama")
    for device in devices
]
"""Presets, and the one device that trains them."""

BATCHES = (8, 32, 128)
"""Rows between two steps of the optimizer: 16 thousand to 262 thousand tokens."""

LENGTH = 2048
"""Tokens per row."""

HOST_BYTES = 1 << 39
"""Host memory that plans may use: 512 GiB."""

KINDS = ("parameters", "gradients", "optimizer", "activations")


def steady_times(
    model: StageCostModel, plan: Plan, group: int = 0, *, batches: int = 3, crowded: bool = True
) -> CopyTimes:
    """A group of devices of a plan on the clock for some batches, with the seconds and bytes of the cost model.

    Transfers between stages take no time.

    Args:
        model: The network and the machine.
        plan: The plan.
        group: The group of devices.
        batches: How many batches.
        crowded: As of :func:`lists_of`.
    """
    lines, costs = lists_of(model, plan, group, crowded=crowded)
    return run_copies([lines] * batches, *costs)


def lists_of(
    model: StageCostModel, plan: Plan, group: int = 0, *, crowded: bool = True
) -> tuple[tuple[Action, ...], Costs]:
    """What a group of devices of a plan does for one batch, and what that takes by the cost model.

    Args:
        model: The network and the machine.
        plan: The plan.
        group: The group of devices.
        crowded: Whether copies are as slow as if the other direction and computing never paused, or as if these were
            not there.
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

    rates, slow = copy_rates(model.profile, model.cluster), interference_of(model.profile, model.cluster)
    to_device, to_host = rates.to_device, rates.to_host
    if crowded and slow is not None:
        to_device /= 1.0 + slow.compute_to_device + slow.to_device_to_host
        to_host /= 1.0 + slow.compute_to_host + slow.to_device_to_host

    def nbytes(action: Action, is_final: bool) -> float:
        kind, unit = action.kind, action.unit or 0
        saved = "checkpoint" if unit in again else "saved"
        name, moved = {
            ActionKind.UNSHARD: ("parameters_in", "parameters"),
            ActionKind.LOAD_PARAMETERS: ("state_out", "parameters"),
            ActionKind.STORE_PARAMETERS: ("state_out", "parameters"),
            ActionKind.LOAD_OPTIMIZER_STATE: ("state_in", "optimizer"),
            ActionKind.STORE_OPTIMIZER_STATE: ("state_out", "optimizer"),
            ActionKind.LOAD_GRADIENTS: ("state_in" if is_final else "gradients_in", "gradients"),
            ActionKind.STORE_GRADIENTS: ("gradients_out", "gradients"),
            ActionKind.LOAD_ACTIVATIONS: (f"{saved}_in", "activations"),
            ActionKind.STORE_ACTIVATIONS: (f"{saved}_out", "activations"),
        }[kind]
        return at(of_one[moved], name, unit) * (rates.to_device if name.endswith("in") else rates.to_host)

    lines = batch_lines(plan, model.spec.module_map, group, lower(plan, tied=False)[group])
    return lines, Costs(seconds, nbytes, (to_device, to_host))


def _loads(model: StageCostModel, plan: Plan, group: int, kinds: tuple[str, ...]) -> Loads:
    slot, some = slots_of(plan, model.cluster)[group]
    ratios = OffloadRatios(**{kind: getattr(plan.stages[group].offload, kind) for kind in kinds})
    _, stages = model._without_copies(slot, replace(some, offload=OffloadCandidates.of(ratios)))
    return loads_of(stages, copy_rates(model.profile, model.cluster))[0]


def recommended(name: str, device: str, rows: int) -> tuple[StageCostModel, Plan]:
    """The plan that is recommended for one device, and what it was chosen with."""
    cluster = parse_cluster(f"1x1x{device}")
    spec = spec_of(PRESETS[name], name, f"1x1x{device}", rows=rows, sequence_length=LENGTH)
    found = tune(spec, cluster, global_batch_size=rows, search=SearchSpace(), host_memory_limit=HOST_BYTES)
    return StageCostModel(spec, catalog_profile(cluster), cluster), found.plan


def hidden_part(times: CopyTimes) -> float:
    """The part of the bytes that a batch between others copies while the device computes."""
    return times.hidden_bytes(1) / sum(copy.nbytes for copy in times.copies[1])


def simulate(name: str, device: str, rows: int) -> Sample:
    """The plan that is recommended, on the clock."""
    model, plan = recommended(name, device, rows)
    stage, times = plan.stages[0], steady_times(model, plan)
    return {
        "model": name,
        "device": device,
        "rows": rows,
        "microbatches": plan.num_microbatches,
        "recomputed": stage.checkpointing.layers,
        **{kind: getattr(stage.offload, kind) for kind in KINDS},
        "copied_bytes": sum(copy.nbytes for copy in times.copies[1]),
        "predicted_step_seconds": plan.predicted.step_seconds if plan.predicted else None,
        "simulated_step_seconds": times.ends[2] - times.ends[1],
        "simulated_hidden_at_least": hidden_part(times),
        "simulated_hidden_at_most": hidden_part(steady_times(model, plan, crowded=False)),
    }


def main() -> None:
    """Simulate all cases and write the record."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    samples = []
    for name, device in CASES:
        for rows in BATCHES:
            samples.append(simulate(name, device, rows))
            print(samples[-1], flush=True)
    notes = (
        f"Simulated, not measured on a card: {PRECISION}, AdamW, {LENGTH} tokens per row, devices as the catalog has "
        "them. Rows are those between two steps of the optimizer; from parameters to activations, what part of each "
        "may be in host memory; hidden, the part of the copied bytes during which the device computes: at least, if "
        "copies are as slow as if the other direction and computing never paused, which the step is of, and at most, "
        "if they are as fast as alone."
    )
    print(write_record(make_record("hidden-copies", samples, notes=notes)))


if __name__ == "__main__":
    main()
