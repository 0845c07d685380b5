"""What several stages say alike as one sentence, with the range of each number."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mist.explain.explanation import Finding
from lightning_mist.plan import Plan

SIMILAR = 0.1
"""Share by which the first number of sentences that are told as one may differ."""

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?)( (?:B|[KMGT]iB|ns|us|ms|s|min|h)\b(?!/)|(?<=\.\d)%)")
"""A measured number: with a unit, or a percentage with a decimal; whole percentages are settings."""

_SCALE = {
    "B": 1.0,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
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
        """Its first number."""
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
    return re.compile(rf"Stages {', '.join(map(str, chunks[:-1]))} and {chunks[-1]}\b")


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
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [
        part
        for first, last in runs
        for part in (map(str, range(first, last + 1)) if last <= first + 1 else [f"{first} to {last}"])
    ]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
