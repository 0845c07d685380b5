"""``lightning-mist simulate``: a plan's schedule on a clock, in figures."""

import json as json_text
from dataclasses import asdict

from lightning_mist.cli.output import answer, display
from lightning_mist.plan import load


def simulate(plan: str, /, json: bool = False) -> None:
    """Run a plan's schedule on a clock, by its predicted seconds: who works, who waits, what the step hangs on.

    Args:
        plan: The plan file.
        json: Print JSON on stdout and nothing else there.
    """
    from lightning_mist.report.step_clock import clock, render_clock

    found = clock(load(plan))
    if not json:
        display(render_clock, found)
        return
    path = found.path
    document = {
        "step_seconds": found.step_seconds,
        "idle_share": found.timeline.idle_share,
        "groups": [{**asdict(group), "work_seconds": dict(group.work_seconds)} for group in found.groups],
        "busiest_group": found.busiest,
        "critical_path": {
            "work_seconds": path.work_seconds,
            "transfer_seconds": path.transfer_seconds,
            "other_seconds": path.other_seconds,
            "actions": [
                {"action": str(span.action), "group": span.rank, "start": span.start, "end": span.end}
                for span in path.spans
            ],
        },
    }
    answer(json_text.dumps(document, indent=1))
