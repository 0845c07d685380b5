"""What is known of a plan that was asked for, and what it needs of memory in words."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_mist.cli.cluster_input import precision_notes
from lightning_mist.plan import split_notes

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate
    from lightning_mist.explain import ComparedPlan
    from lightning_mist.model import ModelSpec
    from lightning_mist.plan import Plan
    from lightning_mist.tuner import Planner, TuneResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """A plan and all that is known of it."""

    planner: "Planner"
    asked: dict[str, Any]
    result: "TuneResult"
    plan: "Plan"
    memory: str
    restricted: tuple[str, ...]
    compared: "tuple[ComparedPlan, ...] | None"
    precision_note: str = ""

    @property
    def spec(self) -> "ModelSpec":
        """The network."""
        return self.planner.spec

    @property
    def cautions(self) -> tuple[str, ...]:
        """What to know before the plan is used; the rest of the notes says where its numbers come from."""
        split = split_notes(self.plan, self.spec.module_map)
        precision = precision_notes(self.planner.cluster, self.spec.precision)
        return (*self.restricted, *split, *precision, *self.spec.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the plan and of its numbers, for people."""
        return (*self.cautions, *self.result.notes)


def memory_words(estimate: "MemoryEstimate") -> str:
    """What a plan needs of devices, and what would leave more room, in sentences."""
    text = estimate.headline()
    if estimate.verdict == "fits":
        return text
    need, has = estimate.worst.device_total, estimate.limit_of(estimate.worst)
    return f"{text} To be surer, plan with less: --memory-limit {int(10 * has / need.p95 * has / 2**30) / 10:g}GiB."
