"""What binds on each stage of a plan: what its next better version would need, and who waits for whom.

A stage is held back by memory if versions of it that take less time (a layer fewer recomputed, a lower ZeRO stage, less
offloaded) all need more than there is. What a stage does once per step hides as far as the stages before it are still
busy (:mod:`lightning_mist.cost.step_time`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_mist.cost import CostModel, StageMemory, models_of
from lightning_mist.cost.inputs import slots_of
from lightning_mist.cost.interleaved_memory import plan_memory
from lightning_mist.cost.time import copy_rates
from lightning_mist.estimate import WORDS
from lightning_mist.explain.explanation import Finding, Version, closed_form_of, group_seconds, in_words
from lightning_mist.plan import Plan, StagePlan
from lightning_mist.plan.changes import OFFLOADS, SAVINGS
from lightning_mist.plan.plan_tables import counted
from lightning_mist.schedule.stage_units import ratio_notes
from lightning_mist.tuner.select import LEAST_SHARE
from lightning_mist.units import format_bytes, format_rate, format_seconds

BY_CLOSED_FORM = ("1f1b", "gpipe")
"""Schedules of which the closed form says what hides."""

HARDLY = 0.1
"""Share of the seconds that a stage's devices save below which the step is said hardly to be shorter."""


def _alone(plan: Plan, group: int) -> float:
    """Seconds that the devices of a group take for one step, waiting for nobody."""
    steady, boundary = group_seconds(plan, group)
    return plan.num_microbatches * steady + boundary


def findings_of(
    model: CostModel,
    plan: Plan,
    *,
    limits: Sequence[float],
    host_limits: Sequence[float] | None = None,
    ratios: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
) -> tuple[Finding, ...]:
    """What binds on every stage, and what does not.

    Args:
        limits: Bytes that tensors may take on each device, by stage.
        host_limits: Bytes of host memory that each device may use, by stage; by default as many as it wants.
    """
    memory = plan_memory(model.memory, plan)
    found: list[Finding] = []
    for group in range(plan.num_groups):
        found.append(_memory(model, plan, memory[group], group, limits[group], ratios))
        if plan.num_groups > 1:
            found.append(_pace(plan, group))
        if plan.schedule in BY_CLOSED_FORM:
            found.append(_boundary(plan, group))
        if plan.stages[group].offload.any:
            host_limit = float("inf") if host_limits is None else host_limits[group]
            found.append(_host_memory(model, plan, memory[group].host_bytes, group, host_limit, ratios))
            found.append(_host_link(model, plan, group))
            found += [
                Finding(stage=group, limit="host memory", binds=False, values=(), text=f"{_stage(plan, group)}: {note}")
                for note in ratio_notes(plan, model.spec.module_map, group)
            ]
    return tuple(found)


def _changed_group(plan: Plan, group: int, stage: StagePlan) -> Plan:
    """A plan whose group of devices does with its first stage as told; chunks agree in all but recomputed layers."""
    stages = list(plan.stages)
    for index in plan.chunks(group):
        own = stages[index]
        stages[index] = replace(own, mesh=stage.mesh, zero_stage=stage.zero_stage, offload=stage.offload)
    stages[group] = stage
    return replace(plan, stages=tuple(stages), predicted=None)


def _memory(
    model: CostModel, plan: Plan, memory: StageMemory, group: int, limit: float, ratios: Sequence[float]
) -> Finding:
    peak, (largest, size) = memory.peak_bytes, max(memory.terms, key=lambda item: item[1])
    free = limit - peak
    head = (
        f"{_does(plan, group, 'need')} {format_bytes(peak)} of the {format_bytes(limit)} that tensors may take on each "
        f"device (largest part: {WORDS[largest]}, {format_bytes(size)}), at its peak in its {memory.phase}"
    )
    values = (
        ("peak_bytes", float(peak)),
        ("limit_bytes", limit),
        ("free_bytes", free),
        (largest.replace("_bytes", "_at_peak_bytes"), float(size)),
    )
    least_gain = LEAST_SHARE * _alone(plan, group)
    faster = [item for item in _versions(model, plan, group, ratios) if item.gain > least_gain]
    lacking = [item for item in faster if item.peak > limit]
    if faster and len(lacking) == len(faster):
        least = min(lacking, key=lambda item: item.peak)
        over = least.peak - limit
        text = (
            f"{head}. Memory holds it back: {least.text} {_gained(plan, group, least)}, but it would need "
            f"{format_bytes(over)} more than there is"
        )
        more = (("missing_bytes", over), ("gain_seconds", least.gain), ("step_gain_seconds", least.step_gain))
        return Finding(stage=group, limit="memory", binds=True, values=(*values, *more), text=text)
    fitting = next((item.text for item in faster if item.peak <= limit), None)
    text = f"{head}; {format_bytes(free)} are free. "
    why = "No technique that saves memory slows it down"
    text += why if fitting is None else f"Memory does not hold it back: {fitting} it would fit too"
    return Finding(stage=group, limit="memory", binds=False, values=values, text=text)


@dataclass(frozen=True, slots=True)
class _Cost:
    """A relaxed version: its peak bytes, the seconds per step that its devices take less, and those of the step."""

    text: str
    peak: int
    gain: float
    step_gain: float


def _versions(model: CostModel, plan: Plan, group: int, ratios: Sequence[float]) -> Iterator[_Cost]:
    own = plan.stages[group]
    for text, stage in (version for saving in SAVINGS for version in saving.less(own, ratios)):
        changed = _changed_group(plan, group, stage)
        steady, boundary = _times(model, changed, group)
        gain = _alone(plan, group) - plan.num_microbatches * steady - boundary
        step_gain = closed_form_of(plan) - closed_form_of(plan, {group: (steady, boundary)})
        yield _Cost(text, plan_memory(model.memory, changed)[group].peak_bytes, gain, step_gain)


def is_hardly(step_gain: float, gain: float, step: float) -> bool:
    """Whether the step gains next to nothing by what a stage gains."""
    return step_gain <= max(LEAST_SHARE * step, HARDLY * gain)


def _gained(plan: Plan, group: int, item: _Cost) -> str:
    """What a relaxed version would gain: the step, or only the stage's own devices while the step waits for others."""
    if plan.num_groups == 1:
        return f"it would take {format_seconds(item.gain)} less per step"
    text = f"its devices would work {format_seconds(item.gain)} less per step"
    if is_hardly(item.step_gain, item.gain, closed_form_of(plan)):
        return f"{text} (the step would hardly be shorter, as it waits for other stages)"
    return f"{text}, and the step would be {format_seconds(item.step_gain)} shorter"


def _times(model: CostModel, plan: Plan, group: int) -> tuple[float, float]:
    """Steady and boundary seconds of one group of devices."""
    slots = slots_of(plan, model.cluster)
    seconds = [model.seconds(*slots[stage]) for stage in plan.chunks(group)]
    return sum(float(item.steady_K[0]) for item in seconds), sum(float(item.boundary_K[0]) for item in seconds)


def _pace(plan: Plan, group: int) -> Finding:
    seconds = [group_seconds(plan, index)[0] for index in range(plan.num_groups)]
    slowest = max(range(plan.num_groups), key=lambda index: seconds[index])
    mine, behind = seconds[group], max(seconds) - seconds[group]
    head = f"{_does(plan, group, 'take')} {format_seconds(mine)} per microbatch{_parts(plan, group, mine)}"
    values: tuple[tuple[str, float], ...] = (("steady_seconds", mine), ("slowest_seconds", seconds[slowest]))
    if group != slowest:
        text = f"{head}, {format_seconds(behind)} less than {_lower(_stage(plan, slowest))}, for which it waits"
        if behind <= 0:
            text = f"{head}, as long as any"
        return Finding(stage=group, limit="pace", binds=behind <= 0, values=values, text=text)
    next_one = max(value for index, value in enumerate(seconds) if index != group)
    text = f"{head}: no stage takes longer, so it sets the pace"
    if mine > next_one:
        text += f"; the next takes {format_seconds(mine - next_one)} ({1 - next_one / mine:.1%}) less"
    values += (("next_seconds", next_one),)
    return Finding(stage=group, limit="pace", binds=True, values=values, text=text)


def _parts(plan: Plan, group: int, steady: float) -> str:
    """What the steady seconds of a group of devices are made of, in brackets."""
    stages = [plan.prediction.stages[stage] for stage in plan.chunks(group)]
    forward, backward = (sum(getattr(item, f"{name}_seconds") for item in stages) for name in ("forward", "backward"))
    rest = steady - forward - backward
    more = f", transfers and overhead {format_seconds(rest)}" if rest > LEAST_SHARE * steady else ""
    return f" (forward {format_seconds(forward)}, backward {format_seconds(backward)}{more})"


def _boundary(plan: Plan, group: int) -> Finding:
    steady, boundary = zip(*(group_seconds(plan, index) for index in range(plan.num_groups)), strict=True)
    before = [0.0, *accumulate(steady)]
    exposed = [max(0.0, mine - earlier) for mine, earlier in zip(boundary, before, strict=False)]
    mine, shown = boundary[group], exposed[group]
    hidden = mine - shown
    head = (
        f"{_does(plan, group, 'take')} {format_seconds(mine)} once per step, to reduce gradients, "
        "update and give out parameters"
    )
    is_longest = shown > 0 and shown == max(exposed)
    binds = is_longest and shown >= LEAST_SHARE * closed_form_of(plan)
    if not shown:
        text = f"{head}; it hides behind the stages before it"
    elif is_longest and hidden > 0:
        text = f"{head}; {format_seconds(shown)} of it lengthen the step"
        text += f", {format_seconds(hidden)} hide behind the stages before it"
    elif is_longest:
        text = f"{head}, which lengthens the step by as much"
    else:
        text = f"{head}; it ends before that of {_lower(_stage(plan, exposed.index(max(exposed))))}"
    values = (("boundary_seconds", mine), ("exposed_seconds", shown))
    return Finding(stage=group, limit="boundary", binds=binds, values=values, text=text)


def _host_memory(
    model: CostModel, plan: Plan, held: int, group: int, host_limit: float, ratios: Sequence[float]
) -> Finding:
    head = f"{_does(plan, group, 'keep')} {format_bytes(held)} per device in host memory"
    if host_limit == float("inf"):
        text = f"{head}, of which no limit is known"
        known = (("host_bytes", float(held)),)
        return Finding(stage=group, limit="host memory", binds=False, values=known, text=text)
    own = plan.stages[group]
    more = [
        plan_memory(model.memory, _changed_group(plan, group, stage))[group]
        for saving in OFFLOADS.values()
        if saving.level(own)
        for stage in saving.more(own, ratios)
    ]
    binds = bool(more) and all(item.host_bytes > host_limit for item in more)
    values = (("host_bytes", float(held)), ("host_limit_bytes", host_limit))
    text = f"{head}, of {format_bytes(host_limit)} that each may use"
    text += "; there is no room to offload one step more of each kind that it offloads" if binds else ""
    return Finding(stage=group, limit="host memory", binds=binds, values=values, text=text)


def _host_link(model: CostModel, plan: Plan, group: int) -> Finding:
    seconds = dict(plan.prediction.stages[group].spent).get("copies_seconds", 0.0)
    own = min(
        models_of(model, plan.stages[group].devices), key=lambda item: copy_rates(item.profile, item.cluster).to_device
    )
    rates, alone = copy_rates(own.profile, own.cluster), own.profile.host_to_device_bytes_per_second
    values = (("copies_seconds", seconds), ("to_device_bytes", rates.to_device), ("to_host_bytes", rates.to_host))
    there, back = (format_rate(rate, "B/s") for rate in (rates.to_device, rates.to_host))
    speeds = f"{there} each way" if there == back else f"{there} to the device and {back} back"
    text = (
        f"{_does(plan, group, 'wait')} {format_seconds(seconds)} per step for copies from and to the host, at {speeds}"
    )
    if 0 < rates.to_device < alone:
        text += f", as all devices of a node copy at once (one alone: {format_rate(alone, 'B/s')})"
    if not seconds:
        text = f"{_does(plan, group, 'wait')} for no copies from and to the host"
    return Finding(stage=group, limit="host link", binds=seconds > 0, values=values, text=text)


def _stage(plan: Plan, group: int) -> str:
    """The stages of a group of devices, to begin a sentence with."""
    if plan.num_stages == 1:
        return "The only stage"
    chunks = plan.chunks(group)
    return f"Stage{'s' * (len(chunks) > 1)} {in_words(list(map(str, chunks)))}"


def _does(plan: Plan, group: int, verb: str) -> str:
    """The stages of a group of devices and what they do."""
    return f"{_stage(plan, group)} {verb}" + ("" if plan.num_groups < plan.num_stages else "s")


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def batch_finding(plan: Plan, versions: Sequence[tuple[int, Version]]) -> Finding:
    """What the next smaller and larger numbers of microbatches would take on the same stages."""
    rows, step = plan.global_batch_size // plan.num_loaders, plan.prediction.step_seconds
    who = "Every device loads" if plan.data_parallel_size is None else f"Each of {plan.num_loaders} data loaders brings"
    sizes = sorted({stage.microbatch_size for stage in plan.stages})
    size = "1 row" if sizes == [1] else f"{' or '.join(map(str, sizes))} rows"
    text = (
        f"{who} {counted(rows, 'row')}, and all must come apart in equal parts: "
        f"{counted(plan.num_microbatches, 'microbatch')} of {size} per data-parallel device"
    )
    values: list[tuple[str, float]] = [("num_microbatches", float(plan.num_microbatches))]
    for count, version in versions:
        if version.seconds is None:
            text += f"; {count} cannot be: {version.reason}"
            continue
        values.append((f"step_with_{count}_seconds", version.seconds))
        change = f"{format_seconds(version.seconds)} per step ({version.seconds / step - 1:+.1%})"
        if not version.fits:
            values.append((f"missing_with_{count}_bytes", float(version.missing_bytes)))
            change += f", but would need {version.lacks} more per device than there is"
        text += f"; {count} would take {change}"
    if not versions:
        text += "; on these stages no other number is possible"
    # Held back: a number of microbatches that is faster is ruled out, or there is no other.
    ruled_out = any(not item.fits and item.seconds is not None and item.seconds < step for _, item in versions)
    return Finding(stage=None, limit="batch", binds=ruled_out or not versions, values=tuple(values), text=text)
