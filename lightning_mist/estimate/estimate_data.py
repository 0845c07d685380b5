"""What a plan needs of every device's memory, as data, and that as JSON: bytes, and names that stay.

Three figures of every stage's most loaded device: *allocated*, what tensors take; *reserved*, what the caching
allocator holds for them; *device total*, with everything that is outside of it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from lightning_mist.estimate.device_need import Interval
from lightning_mist.plan import Plan, to_json
from lightning_mist.units import format_bytes, parse_bytes

Verdict: TypeAlias = Literal["fits", "tight", "does not fit"]

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""From the best to the worst."""

OUTER_TERMS = ("allocator_bytes", "context_bytes", "communicator_bytes")
"""What a device total has beyond tensors: what the allocator keeps free, the context with its kernels, and buffers of
the groups of processes."""

WORDS = {
    "parameter_bytes": "parameters",
    "buffer_bytes": "buffers",
    "optimizer_bytes": "optimizer state",
    "batch_bytes": "batches",
    "gradient_bytes": "gradients",
    "activation_bytes": "activations kept for backward",
    "transfer_bytes": "buffers between stages",
    "working_bytes": "working memory",
    "offload_bytes": "buffers of what is offloaded",
    "allocator_bytes": "kept free by the allocator",
    "context_bytes": "context and kernels",
    "communicator_bytes": "communicators",
}
"""Terms in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """The node on which offload takes most of what it may.

    Attributes:
        bytes: What all of its processes hold there together.
        usable: Bytes that offload may take of the node; what is beyond is for the system and the processes themselves.
        there: Bytes that the node has in all.
    """

    bytes: int
    usable: int
    there: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTensor:
    """A tensor that is alive when a stage needs most.

    Attributes:
        term: Which term it counts to, of :data:`~lightning_mist.cost.memory.memory_model.TERMS`.
        module: Qualified name of the module or parameter it comes from, or what it is where the runtime made it.
        operator: The operator that made it, for example ``"aten.mm.default"``; empty for what is always there.
        line: ``file:line`` of the user's code that ran it, if known.
        count: How many there are that are alike but for their layer or microbatch; this is one of them.
    """

    bytes: int
    term: str
    stage: int
    microbatch: int | None = None
    module: str = ""
    operator: str = ""
    line: str = ""
    dtype: str = ""
    count: int = 1

    @property
    def all_bytes(self) -> int:
        """Bytes of all that are alike."""
        return self.count * self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """The most loaded device of one stage. Chunks that share devices have the figures of these devices.

    Attributes:
        reserved: Bytes that the caching allocator holds; what tensors take where there is no such allocator.
        terms: Bytes by term, as ``(name, bytes)``: those of :data:`~lightning_mist.cost.memory.memory_model.TERMS` add
            up to the p50 of ``allocated``, with :data:`OUTER_TERMS` to that of ``device_total``.
        tensors: The largest tensors alive at the peak, largest first; empty if the allocations are not known.
        kinds: The kinds of tensors (alike but for layer and microbatch) that take most together, largest first.
        flushes: How often in two steps the allocator has to give back what is free, waiting for the device, to stay
            within the limit.
        host_bytes: Pinned host memory of the device's process.
        limit: Bytes of the device that may be used, where devices are unlike; the estimate's if ``None``.
        least: Bytes of the device that 95 of 100 need at least; the p50 of ``device_total`` if ``None``.
    """

    stage: int
    devices: tuple[int, ...]
    phase: str
    allocated: Interval
    reserved: Interval
    device_total: Interval
    terms: tuple[tuple[str, int], ...]
    tensors: tuple[PeakTensor, ...] = ()
    kinds: tuple[PeakTensor, ...] = ()
    flushes: int = 0
    host_bytes: int = 0
    limit: int | None = None
    least: int | None = None

    def term(self, name: str) -> int:
        """Bytes of one term; 0 if there is none."""
        return dict(self.terms).get(name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the plan, and what the plan would then need.

    Attributes:
        runs: Whether the runtime executes such a plan.
    """

    text: str
    runs: bool = True
    device_total: Interval
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a plan needs of the memory of every device.

    Attributes:
        memory_limit: Bytes of each device that may be used.
        source: ``"traced"``, or ``"closed form"`` with the reason.
        changes: What would make it fit, each evaluated, the smallest change first; empty if it fits.
        host: The node on which offload takes most of what it may, if one takes any and its memory is known.
        notes: What is assumed, and what the runtime does not execute.
    """

    model: str
    cluster: str
    memory_limit: int
    precision: str
    optimizer: str
    source: str = "traced"
    stages: tuple[StageEstimate, ...]
    changes: tuple[Change, ...] = ()
    host: HostNeed | None = None
    notes: tuple[str, ...] = ()
    plan: Plan

    @property
    def worst(self) -> StageEstimate:
        """The stage whose device needs most, of unlike devices most of what it has."""
        return worst_of(self.stages)

    def limit_of(self, stage: StageEstimate) -> int:
        """Bytes that the devices of a stage may use."""
        return self.memory_limit if stage.limit is None else stage.limit

    @property
    def verdict(self) -> Verdict:
        """``"fits"`` if what suffices in 95 of 100 cases is within the limit, ``"tight"`` if what all need is.

        What is offloaded has to be within what it may take of its node, and is tight within what the node has.
        """
        return max(self.device_verdict, self._host_verdict(), key=VERDICTS.index)

    @property
    def device_verdict(self) -> Verdict:
        """The verdict about devices alone, whatever their hosts have."""
        limit = self.memory_limit
        found = [
            verdict_of(stage.device_total, limit if stage.limit is None else min(limit, stage.limit), stage.least)
            for stage in self.stages
        ]
        return max(found, key=VERDICTS.index)

    def _host_verdict(self) -> Verdict:
        if self.host is None or self.host.bytes <= self.host.usable:
            return "fits"
        return "tight" if self.host.bytes <= self.host.there else "does not fit"

    @property
    def is_likely(self) -> bool:
        """Whether the prediction is within the limit, whatever its error."""
        return self.worst.device_total.p50 <= self.limit_of(self.worst)

    def fits(self, memory_limit: str | int | None = None) -> bool:
        """Whether every stage fits in 95 of 100 cases.

        Args:
            memory_limit: Bytes of each device, or text such as ``"22GiB"``; by default :attr:`memory_limit`.

        Raises:
            ValueError: If it is not a size.
        """
        limit = self.memory_limit if memory_limit is None else parse_bytes(memory_limit)
        return replace(self, memory_limit=limit).verdict == "fits"

    def subject(self) -> str:
        """What is estimated, in one line."""
        plan = self.plan
        return (
            f"{self.model}, {self.precision}, {self.optimizer}, on {self.cluster}: {plan.global_batch_size} rows in "
            f"{plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''}, {plan.schedule}"
        )

    def headline(self) -> str:
        """The verdict in one or two plain sentences."""
        worst, limit = self.worst, format_bytes(self.limit_of(self.worst))
        at, total = f"stage {worst.stage} of {len(self.stages)}", worst.device_total
        terms = sorted(worst.terms, key=lambda item: -item[1])
        largest = ", ".join(f"{WORDS[name]} {format_bytes(value)}" for name, value in terms[:2])
        of_tensors = f" (tensors {format_bytes(worst.allocated.p50)})" if worst.allocated.p50 < total.p50 else ""
        need = f"{at} needs {format_bytes(total.p50)}{of_tensors}, up to {format_bytes(total.p95)} in 95 of 100 cases"
        begin = {"fits": "Fits", "tight": "Tight: it may not fit", "does not fit": "Does not fit"}[self.device_verdict]
        if begin.startswith("Tight") and not self.is_likely:
            begin = "Very tight: more likely than not it does not fit"
        return f"{begin} in {limit} per device: {need}. Largest: {largest}.{self._host_words()}"

    def _host_words(self) -> str:
        """What a node's memory has to hold."""
        if self.host is None:
            return ""
        words = {"fits": "It fits", "tight": "That is tight", "does not fit": "It does not fit"}[self._host_verdict()]
        held, usable, there = (format_bytes(value) for value in (self.host.bytes, self.host.usable, self.host.there))
        return f" Offload holds {held} of a host's {there}. {words} in the {usable} that it may take."

    def explain(self) -> str:
        """The verdict, what would make it fit, and what is assumed, as lines of text."""
        lines = [self.headline()]
        if self.verdict != "fits":
            lines += [f"would fit with {describe_change(change)}" for change in self.changes]
            if not self.changes:
                lines.append(
                    "nothing that was tried makes it fit: more devices, devices with more memory, or a smaller model "
                    "are needed"
                )
        lines.append(f"source: {self.source}")
        return "\n".join((*lines, *self.notes))


def describe_change(change: Change) -> str:
    """One change with its bytes."""
    remark = "" if change.runs else " (planned, not run yet)"
    total = change.device_total
    return f"{change.text}: {format_bytes(total.p50)}, up to {format_bytes(total.p95)}{remark}"


def need_of(stage: StageEstimate) -> tuple[float, float]:
    """What stages are compared by: bytes, of unlike devices as parts of what they may use."""
    limit = 1 if stage.limit is None else max(stage.limit, 1)
    return stage.device_total.p95 / limit, stage.device_total.p50 / limit


def worst_of(stages: Sequence[StageEstimate]) -> StageEstimate:
    """The stage whose device needs most, of unlike devices most of what it has."""
    return max(stages, key=need_of)


def verdict_of(need: Interval, limit: int, least: int | None = None) -> Verdict:
    """What a need means under a limit.

    Args:
        least: What 95 of 100 need at least; the p50 of ``need`` if not given.
    """
    if need.p95 <= limit:
        return "fits"
    return "tight" if (need.p50 if least is None else least) <= limit else "does not fit"


SCHEMA = 1
"""The version of the document."""

_PAIRS = ("terms", "values")
"""Fields of records that hold pairs of a name and a number: objects in JSON."""


def as_data(value: Any) -> Any:
    """A record as JSON has it: fields by name, plans as in plan files."""
    if isinstance(value, Plan):
        return json.loads(to_json(value))
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: dict(item) if name in _PAIRS else as_data(item) for name, item in found.items()}
    return [as_data(item) for item in value] if isinstance(value, tuple) else value


def estimate_to_json(estimate: MemoryEstimate) -> str:
    """An estimate as text, with its verdict; equal estimates give equal text."""
    derived = {"schema": SCHEMA, "verdict": estimate.verdict, "worst_stage": estimate.worst.stage}
    return json.dumps({**derived, **as_data(estimate)}, indent=1, allow_nan=False) + "\n"
