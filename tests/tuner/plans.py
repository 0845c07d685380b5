"""Plans by hand, for questions about plans."""

import itertools

from lightning_mist.plan.grid import rank_layout
from lightning_mist.tuner.candidates import ANY_SEAMS, BEHIND, EVERY_PART, FRONT
from lightning_mist.tuner.space import ANYWHERE
from tests.plans import plan_of


def pipeline(*stages, microbatches=4, rows=4, per_node=None, **changes):
    """A plan whose devices load ``rows`` each; stages are mappings as those of ``plan_of``.

    Under ``schedule="interleaved-1f1b"`` ``groups`` says how many of them share all devices.
    """
    groups = changes.pop("groups", len(stages))
    layout = rank_layout([(stage.get("data", 1), stage.get("tensor", 1)) for stage in stages[:groups]], per_node)
    placed = [{**stage, "devices": layout[index % groups]} for index, stage in enumerate(stages)]
    return plan_of(rows * sum(map(len, layout)), microbatches, *placed, **changes)


def is_at_its_seams(problem, chosen, stage):
    """Whether the stages next to one lie in other parts as its choice is priced."""
    parts = [int(slot.part_K[index]) for slot, index in zip(problem.slots, chosen, strict=True)]
    wanted = int(problem.slots[stage].seams_K[chosen[stage]])
    front = stage > 0 and parts[stage - 1] != parts[stage]
    behind = stage < len(parts) - 1 and parts[stage + 1] != parts[stage]
    return wanted in (ANY_SEAMS, FRONT * front + BEHIND * behind)


def is_feasible(problem, chosen):
    """Whether the choices cover every layer once, in order, and use every device of every part, neighbours together."""
    position, left = 0, list(problem.num_devices)
    for slot, index in zip(problem.slots, chosen, strict=True):
        if slot.start_K[index] not in (ANYWHERE, position):
            return False
        position += int(slot.layers_K[index])
        part, devices = int(slot.part_K[index]), int(slot.devices_K[index])
        if part != EVERY_PART:
            left[part] -= devices
        elif devices == sum(problem.num_devices) and left == list(problem.num_devices):
            left = [0] * len(left)
        else:
            return False
    if not all(is_at_its_seams(problem, chosen, stage) for stage in range(len(chosen))):
        return False
    passed = [int(slot.part_K[index]) for slot, index in zip(problem.slots, chosen, strict=True)]
    ways = tuple(part for part, _ in itertools.groupby(passed))
    return position == problem.num_layers and not any(left) and ways in ((EVERY_PART,), problem.order)
