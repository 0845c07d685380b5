"""Which of plans that cannot be told apart is simpler.

A plan is simpler than another

1. if it uses fewer techniques, each of which is one more thing that takes part in every step and has to work: a kind of
   state in host memory, a kind of state that data-parallel ranks share out (a ZeRO stage is as many of these as its
   number), tensor, sequence or context parallelism, recomputation, a schedule with chunks or split backwards;
2. of as many techniques, if its stages have fewer different shapes;
3. of as many shapes, if it has fewer stages.
"""

from collections.abc import Iterable
from typing import TypeAlias

from lightning_mist.plan import Plan

ALIKE = 1e-3
"""A share of the seconds of a step by which plans cannot be told apart: a tenth of what lies between runs of one and
the same plan (the steps of DDP in the record ``throughput-against-ddp_amd-epyc-2-cores_202611.json``)."""

Simplicity: TypeAlias = tuple[int, int, int]
"""Numbers of techniques, of shapes of stages, and of stages: the lesser, the simpler."""

_MOVED = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
}
_SHARED = ("optimizer state", "gradients", "parameters")


def techniques(plan: Plan) -> tuple[str, ...]:
    """What a plan does beyond computing every layer once on every rank, in words.

    Args:
        plan: The plan.
    """
    meshes = [stage.mesh for stage in plan.stages]
    # Alone a rank has nobody to share anything with.
    sharing = [stage for stage in plan.stages if stage.data_parallel_degree * stage.mesh.context_parallel_degree > 1]
    level = max((int(stage.zero_stage) for stage in sharing), default=0)
    moved = [words for name, words in _MOVED.items() if any(getattr(stage.offload, name) for stage in plan.stages)]
    found = [f"{words} in host memory" for words in moved]
    found += [f"sharded {words}" for words in _SHARED[:level]]
    used = {
        "tensor parallelism": any(mesh.tensor_parallel_degree > 1 for mesh in meshes),
        "sequence parallelism": any(mesh.sequence_parallel for mesh in meshes),
        "context parallelism": any(mesh.context_parallel_degree > 1 for mesh in meshes),
        "recomputation": any(stage.checkpointing.layers for stage in plan.stages),
        # One stage has no schedule to speak of, and both of these run whole backwards of whole stages.
        plan.schedule: plan.num_groups > 1 and plan.schedule not in ("1f1b", "gpipe"),
    }
    return (*found, *(name for name, is_used in used.items() if is_used))


def shapes(plan: Plan) -> int:
    """How many different stages a plan has: by layers, arrangement of devices, rows and savings."""
    return len(
        {
            (
                stage.num_layers,
                stage.mesh.data_parallel_degree,
                stage.mesh.tensor_parallel_degree,
                stage.mesh.context_parallel_degree,
                stage.mesh.sequence_parallel,
                stage.zero_stage,
                stage.checkpointing,
                stage.offload,
            )
            for stage in plan.stages
        }
    )


def simplicity(plan: Plan) -> Simplicity:
    """How simple a plan is, see :data:`Simplicity`.

    Args:
        plan: The plan.
    """
    return len(techniques(plan)), shapes(plan), plan.num_stages


def simplest(plans: Iterable[tuple[Plan, float]]) -> Plan:
    """The simplest of the plans that cannot be told apart from the fastest; of equally simple ones the fastest.

    Args:
        plans: Plans and their seconds on the clock, at least one.
    """
    found = list(plans)
    most = min(seconds for _, seconds in found) * (1 + ALIKE)
    near = [(plan, seconds) for plan, seconds in found if seconds <= most]
    return min(near, key=lambda item: (simplicity(item[0]), item[1]))[0]


def why_simpler(plan: Plan, other: Plan) -> str:
    """What makes a plan simpler than another, in words: the first thing that counts.

    Args:
        plan: The simpler plan.
        other: The other one.
    """
    own, others = techniques(plan), techniques(other)
    if len(own) < len(others):
        without = " and ".join(name for name in others if name not in own)
        return f"it does without {without}"
    if shapes(plan) < shapes(other):
        return f"it has {_count(shapes(plan), 'kind')} of stages in place of {shapes(other)}"
    return f"it has {_count(plan.num_stages, 'stage')} in place of {other.num_stages}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
