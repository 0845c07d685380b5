"""Why a plan is what it is, as data: what binds, what each technique buys, what else there was, what more would buy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lightning_mist.cost import step_seconds
from lightning_mist.plan import OFFLOAD_KINDS, Plan
from lightning_mist.plan.changes import OFFLOADS
from lightning_mist.plan.plan_tables import counted
from lightning_mist.units import format_bytes

Limit = Literal["memory", "pace", "boundary", "host memory", "host link", "batch"]
"""What can hold a stage back: memory of its devices, seconds of its microbatches, what it does once per step, memory of
its node's host, copies between device and host, and the batch that has to come apart in equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one limit means for one stage.

    Attributes:
        values: The numbers behind the sentence, as ``(name, value)``; names of bytes end in ``_bytes``, of seconds in
            ``_seconds``.
    """

    stage: int | None
    limit: Limit
    binds: bool
    values: tuple[tuple[str, float], ...]
    text: str

    def value(self, name: str) -> float:
        """One of its numbers."""
        return dict(self.values)[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A plan in place of the chosen one.

    Attributes:
        missing_bytes: Bytes that it needs beyond what its devices may use, on the device that lacks most; 0 if it fits.
        missing_host_bytes: The same of host memory, for one device.
        proven: Whether the search for it has shown that no better one of its kind exists by the closed form under the
            schedule of the exact search; True of a plan that was not searched for.
        reason: Why there is none; empty if there is one.
    """

    plan: Plan | None
    missing_bytes: int = 0
    missing_host_bytes: int = 0
    proven: bool = True
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds of its step."""
        return None if self.plan is None else self.plan.prediction.step_seconds

    @property
    def fits(self) -> bool:
        """Whether there is a plan, and it fits."""
        return self.plan is not None and not self.missing_bytes and not self.missing_host_bytes

    @property
    def lacks(self) -> str:
        """What it lacks of memory, for people; empty if it fits."""
        missing = ((self.missing_bytes, "memory"), (self.missing_host_bytes, "host memory"))
        return " and ".join(f"{format_bytes(size)} of {name}" for size, name in missing if size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueValue:
    """What one technique of a plan buys.

    Attributes:
        best_without: The best plan of the search space without it; ``None`` if it was not looked for.
    """

    name: str
    meaning: str
    use: str
    switched_off: Version
    best_without: Version | None = None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Kind:
    """What tells plans apart at first sight.

    Attributes:
        schedule: Name of the schedule; ``"1f1b"`` of a single stage, where schedules do not differ.
    """

    stages: int
    tensor: tuple[int, ...]
    zero: tuple[int, ...]
    checkpointing: bool
    offload: tuple[str, ...]
    schedule: str


def kind_of(plan: Plan) -> Kind:
    """The kind of a plan."""
    return Kind(
        stages=plan.num_groups,
        tensor=tuple(sorted({stage.mesh.tensor_parallel_degree for stage in plan.stages})),
        zero=tuple(sorted({int(stage.zero_stage) for stage in plan.stages})),
        checkpointing=any(stage.checkpointing.layers for stage in plan.stages),
        offload=tuple(kind for kind in OFFLOAD_KINDS if any(OFFLOADS[kind].level(stage) for stage in plan.stages)),
        schedule=plan.schedule if plan.num_groups > 1 else "1f1b",
    )


def group_seconds(plan: Plan, group: int) -> tuple[float, float]:
    """Predicted steady and boundary seconds of all stages that share the devices of a group."""
    stages = [plan.prediction.stages[chunk] for chunk in plan.chunks(group)]
    return sum(stage.steady_seconds for stage in stages), sum(stage.boundary_seconds for stage in stages)


def closed_form_of(plan: Plan, changed: Mapping[int, tuple[float, float]] = MappingProxyType({})) -> float:
    """Step seconds of a plan under 1F1B, by the form that the search minimises; chunks as if they were in one piece.

    Args:
        changed: Groups that have other steady and boundary seconds.
    """
    times = {group: group_seconds(plan, group) for group in range(plan.num_groups)}
    steady, boundary = zip(*{**times, **changed}.values(), strict=True)
    return step_seconds(steady, boundary, plan.num_microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPlan:
    """The best plan that was found of another kind."""

    plan: Plan
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What a better machine would buy.

    Attributes:
        same_plan: The chosen plan on that machine; ``None`` if it cannot run there, or nothing about it changes.
        best: The best plan for that machine; ``None`` if it was not looked for.
    """

    change: str
    same_plan: Version | None
    best: Version | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why this plan.

    Attributes:
        limits: Bytes that tensors may take on each device of each stage.
        others: The next best plans that differ in kind, fastest first.
        more_seconds: About how many more the rest would take, each as long as the longest search so far.
    """

    plan: Plan
    limits: tuple[float, ...]
    findings: tuple[Finding, ...]
    techniques: tuple[TechniqueValue, ...] = ()
    others: tuple[OtherPlan, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    left_out: tuple[str, ...] = ()
    unsearched: tuple[str, ...] = ()
    seconds: float = 0.0
    more_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of the plan's step."""
        return self.plan.prediction.step_seconds


def differences(kind: Kind, other: Kind) -> tuple[str, ...]:
    """What another kind of plan does differently, in words."""
    found = []
    if other.stages != kind.stages:
        found.append(f"{counted(other.stages, 'stage')} in place of {counted(kind.stages, 'stage')}")
    if other.tensor != kind.tensor:
        found.append(_tensor(other.tensor))
    if other.zero != kind.zero:
        found.append(f"{_zero(other.zero)} in place of {_zero(kind.zero)}")
    if other.checkpointing != kind.checkpointing:
        found.append("recomputes layers" if other.checkpointing else "recomputes no layer")
    if more := [OFFLOAD_KINDS[name] for name in other.offload if name not in kind.offload]:
        found.append(f"offloads {in_words(more)}")
    if less := [OFFLOAD_KINDS[name] for name in kind.offload if name not in other.offload]:
        found.append(f"does not offload {in_words(less)}")
    if other.schedule != kind.schedule and min(kind.stages, other.stages) > 1:  # One stage has no schedule to speak of.
        found.append(f"schedule {other.schedule} in place of {kind.schedule}")
    return tuple(found)


def _tensor(degrees: Sequence[int]) -> str:
    shared = [str(degree) for degree in degrees if degree > 1]
    if not shared:
        return "no tensor parallelism"
    where = "on some stages" if 1 in degrees else ""
    return f"tensor parallelism over {in_words(shared)} devices {where}".rstrip()


def _zero(levels: Sequence[int]) -> str:
    return in_words(["no ZeRO" if level == 0 else f"ZeRO-{level}" for level in levels])


def in_words(items: Sequence[str]) -> str:
    """Items as a list in a sentence: ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
