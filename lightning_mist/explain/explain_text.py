"""An explanation as sentences, as tables at a terminal, and as data for other programs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from textwrap import wrap
from typing import Any

from rich.table import Column, Table

from lightning_mist.console import TextConsole
from lightning_mist.estimate import WORDS, as_data
from lightning_mist.explain.explanation import (
    Explanation,
    Finding,
    OtherPlan,
    TechniqueValue,
    Version,
    WhatIf,
    in_words,
)
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_text import ranges_of
from lightning_mist.tuner.select import LEAST_SHARE
from lightning_mist.units import format_bytes, format_seconds

SIMILAR = 0.1
"""Share by which the first number of sentences that are told as one may differ."""

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?)( (?:B|[KMGT]iB|ns|us|ms|s|min|h)\b(?!/)|(?<=\.\d)%)")
"""A measured number: with a unit, or a percentage with a decimal; whole percentages are settings."""

_SCALE = {
    **{unit: 1024.0**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "%": 0.01,
}


@dataclass(frozen=True, slots=True)
class _Said:
    """A finding's sentence without the stages that it is about: its words, and its numbers in order."""

    finding: Finding
    stages: str
    words: tuple[str, ...]
    numbers: tuple[tuple[float, str, str], ...]

    @property
    def first(self) -> float:
        return self.numbers[0][0] if self.numbers else 0.0


def told_together(plan: Plan, findings: Sequence[Finding]) -> tuple[str, ...]:
    """The sentences of findings, those of stages that say the same with similar numbers as one, in their order."""
    groups: list[list[_Said]] = []
    for finding in findings:
        said = _said(plan, finding)
        near = next((group for group in groups if _is_near(group, said)), None)
        if near is None:
            groups.append([said])
        else:
            near.append(said)
    return tuple(group[0].finding.text if len(group) == 1 else _joined(plan, group) for group in groups)


def _said(plan: Plan, finding: Finding) -> _Said:
    stages, text = "", finding.text
    if finding.stage is not None:
        match = _subject(plan, finding.stage).match(text)
        stages = match[0] if match else ""
    rest = text[len(stages) :]
    numbers = tuple(
        (float(match[1].replace(",", "")) * _SCALE[match[2].strip()], match[1], match[2])
        for match in _NUMBER.finditer(rest)
    )
    return _Said(finding, stages, tuple(_NUMBER.sub("\0", rest).split("\0")), numbers)


def _subject(plan: Plan, group: int) -> re.Pattern[str]:
    """How sentences about a group of devices begin."""
    chunks = plan.chunks(group)
    if len(chunks) == 1:
        return re.compile(rf"Stage {group}\b")
    return re.compile(rf"Stages {in_words(list(map(str, chunks)))}\b")


def _is_near(group: Sequence[_Said], said: _Said) -> bool:
    one = group[0]
    if not one.stages or not said.stages or one.words != said.words:
        return False
    firsts = [item.first for item in (*group, said)]
    return one.finding.limit == said.finding.limit and max(firsts) <= min(firsts) * (1 + SIMILAR)


def _joined(plan: Plan, group: Sequence[_Said]) -> str:
    """One sentence for all of a group."""
    where = ranges([item.finding.stage for item in group if item.finding.stage is not None])
    has_chunks = plan.num_groups < plan.num_stages
    head = f"The stages of each of the groups of devices {where}" if has_chunks else f"Each of stages {where}"
    text = head + group[0].words[0]
    for index, words in enumerate(group[0].words[1:]):
        numbers = [item.numbers[index] for item in group]
        text += _range(min(numbers), max(numbers)) + words
    return text


def _range(least: tuple[float, str, str], most: tuple[float, str, str]) -> str:
    (_, first, unit), (_, last, other) = least, most
    if (first, unit) == (last, other):
        return f"{first}{unit}"
    return f"{first} to {last}{unit}" if unit == other else f"{first}{unit} to {last}{other}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: ``0 to 3, 5 and 7 to 9``."""
    return in_words(
        [
            part
            for first, last in ranges_of(numbers)
            for part in (map(str, range(first, last + 1)) if last <= first + 1 else [f"{first} to {last}"])
        ]
    )


Section = tuple[str, tuple[str, ...]]
"""A title and its sentences."""


def explanation_sections(explanation: Explanation) -> tuple[Section, ...]:
    """An explanation as titles with sentences; sections without any are left out."""
    step = explanation.step_seconds
    # Of stages that wait, or that hide something, one sentence is enough.
    told = [finding for finding in explanation.findings if finding.binds or finding.limit not in ("pace", "boundary")]
    findings = [f"{text}." for text in told_together(explanation.plan, told)]
    sections: list[Section] = [
        ("what binds and what does not", (*findings, *_together(explanation))),
        ("what each technique buys", tuple(technique_line(item, step) for item in explanation.techniques)),
        ("the best plans found of other kinds", tuple(_other(item, step) for item in explanation.others)),
        ("what a better machine would buy", tuple(what_if_line(item, step) for item in explanation.what_ifs)),
        ("left out", (*_unsearched(explanation), *(f"{text}." for text in explanation.left_out))),
    ]
    return tuple((title, lines) for title, lines in sections if lines)


def _unsearched(explanation: Explanation) -> tuple[str, ...]:
    """What there was no time to search for, and how to have it searched for."""
    if not explanation.unsearched:
        return ()
    needed = max(1, round(explanation.seconds + explanation.more_seconds))
    had, missing = format_seconds(explanation.seconds), "; ".join(explanation.unsearched)
    return (
        f"in {had} there was no time to search for {missing}.",
        f"--explain-seconds {needed} gives about the time that this takes (explain_plan: seconds={needed}).",
    )


def _together(explanation: Explanation) -> list[str]:
    """One sentence for all stages that wait for the slowest, and one for those whose boundary time does not show."""
    free = [item for item in explanation.findings if not item.binds]
    waiting = [
        (item.stage, item.value("slowest_seconds") - item.value("steady_seconds"))
        for item in free
        if item.limit == "pace"
    ]
    hidden = [(item.stage, item.value("boundary_seconds")) for item in free if item.limit == "boundary"]
    told = (
        ("Waiting for the slowest stage, per microbatch", waiting),
        ("Reducing gradients and updating, hidden behind other stages", hidden),
    )
    return [f"{what}: {'; '.join(_by_stage(stages))}." for what, stages in told if stages]


def _by_stage(items: Sequence[tuple[int | None, float]]) -> Iterator[str]:
    """Seconds of stages, those with the same figure together."""
    alike: dict[str, list[int]] = {}
    for stage, seconds in items:
        if stage is not None:
            alike.setdefault(format_seconds(seconds), []).append(stage)
    for figure, stages in alike.items():
        yield f"stage{'s' * (len(stages) > 1)} {ranges(stages)} {figure}"


def technique_line(value: TechniqueValue, step_seconds: float) -> str:
    """What a technique buys."""
    off = value.switched_off
    if off.plan is None:
        text = f"It cannot be switched off by itself ({_sentence(off.reason)})"
    elif not off.fits:
        text = f"Without it the plan needs {off.lacks} more per device than there is"
        text += f"; with that much it would take {_against(off, step_seconds)}"
    else:
        text = f"Without it the plan takes {_against(off, step_seconds)}"
    line = f"{value.name} ({value.meaning}): {value.use}. {text}"
    best = value.best_without
    if best is None:
        return f"{line}."
    if best.plan is None:
        return f"{line}. The search space has no plan without it that fits."
    which = "" if best.proven else "that was found "
    return f"{line}. The best plan {which}without it takes {_against(best, step_seconds)}."


def what_if_line(item: WhatIf, step_seconds: float) -> str:
    """What a better machine would buy."""
    return f"{item.change}: {_bought(item, step_seconds)}."


def _bought(item: WhatIf, step_seconds: float) -> str:
    same, best = item.same_plan, item.best
    seconds = [version.seconds for version in (same, best) if version is not None and version.fits]
    known = [value for value in seconds if value is not None]
    if not known:
        reason = next((version.reason for version in (best, same) if version is not None and version.reason), "")
        return _sentence(reason) if reason else "not looked for"
    least = min(known)
    if 1 - least / step_seconds < LEAST_SHARE:
        if best is None:
            return "no gain by this plan; others were not looked for"
        return "no gain" if best.proven else "no gain was found"
    gain = f"{format_seconds(least)} per step ({least / step_seconds - 1:+.1%})"
    if best is None:
        return f"{gain} by this plan; a better one was not looked for"
    other = "another plan" if best.proven else "another plan, the best that was found"
    return gain + _by_which(same, least, step_seconds, other)


def _by_which(same: Version | None, least: float, step_seconds: float, other: str) -> str:
    """Whether the plan at hand has the least seconds on a better machine, and what it has if not."""
    if same is None or not same.fits or same.seconds is None:
        return f", by {other}"
    if same.seconds <= least * (1 + LEAST_SHARE):
        return ", without changing the plan"
    if abs(same.seconds / step_seconds - 1) < LEAST_SHARE:
        return f", by {other}"
    return f" by {other}; this one would take {_against(same, step_seconds)}"


def _other(item: OtherPlan, step_seconds: float) -> str:
    said = item.plan.prediction
    change = f"{format_seconds(said.step_seconds)} per step ({said.step_seconds / step_seconds - 1:+.1%})"
    return f"{change}, peak {format_bytes(said.peak_bytes)}: {', '.join(item.differences)}."


def _against(version: Version, step_seconds: float) -> str:
    """Seconds per step, and how far they are from those of the plan."""
    assert version.seconds is not None
    share = version.seconds / step_seconds - 1
    if abs(share) < LEAST_SHARE:
        return f"as long, {format_seconds(version.seconds)} per step"
    return f"{format_seconds(version.seconds)} per step ({share:+.1%})"


def _sentence(text: str) -> str:
    """An error's first sentence, without its point."""
    return text.split(". ", maxsplit=1)[0].rstrip(".")


def explanation_data(explanation: Explanation) -> dict[str, Any]:
    """An explanation for other programs: numbers in seconds and bytes, plans as in plan files, and the sentences."""
    step = explanation.step_seconds
    return {
        "step_seconds": step,
        "limit_bytes": list(explanation.limits),
        "findings": as_data(explanation.findings),
        "techniques": [_told(item, technique_line(item, step)) for item in explanation.techniques],
        "others": [
            {
                "plan": as_data(item.plan),
                "step_seconds": item.plan.prediction.step_seconds,
                "differences": list(item.differences),
                "text": _other(item, step),
            }
            for item in explanation.others
        ],
        "what_ifs": [_told(item, what_if_line(item, step)) for item in explanation.what_ifs],
        "left_out": list(explanation.left_out),
        "unsearched": list(explanation.unsearched),
        "more_seconds": explanation.more_seconds,
        "seconds": explanation.seconds,
    }


def _told(item: TechniqueValue | WhatIf, text: str) -> dict[str, Any]:
    """A record with its sentence, and versions with the seconds of their steps."""
    found: dict[str, Any] = {}
    for field in fields(item):
        value = getattr(item, field.name)
        found[field.name] = as_data(value)
        if isinstance(value, Version):
            own = found[field.name]
            found[field.name] = {"plan": own.pop("plan"), "step_seconds": value.seconds, **own}
    return {**found, "text": text}


LEAST_TERM = 0.005
"""Terms that take a smaller share of every stage's peak have no column of their own."""


def render_explanation(explanation: Explanation, *, width: int = 120, color: bool = False) -> str:
    """An explanation as text: the bytes of every stage by term, and titles with sentences."""
    console = TextConsole(width, color=color)
    title, table = memory_table(explanation.plan)
    console.print(title, style="bold italic")
    console.print_table(table)
    console.print()
    _print_sections(console, explanation_sections(explanation))
    return console.text


def render_sections(sections: Sequence[Section], *, width: int = 120, color: bool = False) -> str:
    """Titles with sentences as text, a line between sections."""
    console = TextConsole(width, color=color)
    _print_sections(console, [(title, lines) for title, lines in sections if lines])
    return console.text


def _print_sections(console: TextConsole, sections: Sequence[Section]) -> None:
    for place, (title, lines) in enumerate(sections):
        if place:
            console.print()
        console.print(title, style="bold italic")
        for line in lines:
            parts = wrap(line, console.width - 2, break_long_words=False, break_on_hyphens=False)
            for number, part in enumerate(parts):
                console.print(f"{'  ' if number else '- '}{part}", soft_wrap=True)


def memory_table(plan: Plan) -> tuple[str, Table]:
    """A title and a table of what the peak of every group of devices is made of."""
    stages = [plan.prediction.stages[group] for group in range(plan.num_groups)]
    rows = [{name: size for name, size in stage.breakdown if name in WORDS} for stage in stages]
    shown = [
        name
        for name in WORDS
        if any(row.get(name, 0.0) > LEAST_TERM * stage.peak_bytes for row, stage in zip(rows, stages, strict=True))
    ]
    headings = ("stage", *(WORDS[name] for name in shown), "others", "peak")
    table = Table(*(Column(heading, justify="right") for heading in headings))
    for group, (row, stage) in enumerate(zip(rows, stages, strict=True)):
        others = stage.peak_bytes - sum(row.get(name, 0.0) for name in shown)
        cells = [*(row.get(name, 0.0) for name in shown), others, float(stage.peak_bytes)]
        table.add_row(
            " and ".join(map(str, plan.chunks(group))), *(format_bytes(size) if size else "-" for size in cells)
        )
    return "bytes of the most loaded device at its peak, by stage", table
