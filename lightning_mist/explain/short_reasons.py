"""The main reasons for a plan, a short sentence each."""

import re

from lightning_mist.explain.explanation import Explanation, Finding, TechniqueValue
from lightning_mist.explain.findings import is_hardly
from lightning_mist.tuner.select import LEAST_SHARE
from lightning_mist.units import format_seconds

_TECHNIQUES = 2
"""How many of the reasons are techniques, at most, where something binds too."""

_FIRST: tuple[str, ...] = ("memory", "pace", "host link", "boundary", "host memory", "batch")
"""Limits in the order in which they say most of a plan."""

_ASIDE = re.compile(r" \([^()]*\)")


def main_reasons(explanation: Explanation, most: int = 3) -> tuple[str, ...]:
    """What its techniques buy that buy most, and what binds first.

    Techniques without which the plan needs more memory than there is come first, those that lack most ahead; then
    those without which it takes longest.
    """
    step = explanation.step_seconds
    gains = [item for item in explanation.techniques if _gain(item, step) > LEAST_SHARE or _lacks(item)]
    gains.sort(key=lambda item: (-_lacks(item), -_gain(item, step)))
    binding = [finding for finding in explanation.findings if finding.binds and not _is_felt_little(finding, step)]
    binding.sort(key=lambda finding: (_FIRST.index(finding.limit), -dict(finding.values).get("step_gain_seconds", 0.0)))
    limits = list(dict.fromkeys(_brief(finding.text) for finding in binding))
    told = [_bought(item, step) for item in gains[: most - min(len(limits), most - _TECHNIQUES)]]
    return (*told, *limits[: most - len(told)])


def _lacks(item: TechniqueValue) -> int:
    """Bytes that the plan lacks without a technique."""
    return item.switched_off.missing_bytes + item.switched_off.missing_host_bytes


def _gain(item: TechniqueValue, step_seconds: float) -> float:
    """How much longer the step is without a technique, as a share; nothing where that is not known."""
    seconds = item.switched_off.seconds
    return 0.0 if seconds is None else seconds / step_seconds - 1


def _bought(item: TechniqueValue, step_seconds: float) -> str:
    off = item.switched_off
    if not off.fits:
        return f"{item.name}: without, {off.lacks} more per device would be needed than there is"
    assert off.seconds is not None
    return f"{item.name}: without, a step takes {format_seconds(off.seconds)} ({_gain(item, step_seconds):+.1%})"


def _is_felt_little(finding: Finding, step_seconds: float) -> bool:
    values = dict(finding.values)
    return "step_gain_seconds" in values and is_hardly(
        values["step_gain_seconds"], values["gain_seconds"], step_seconds
    )


def _brief(text: str) -> str:
    """The first clause of a finding, without asides."""
    return re.split(r"\. |; ", _ASIDE.sub("", text))[0].rstrip(".")
