"""``lightning-mist show``: a plan file as a table, beside another one, on a clock."""

from pathlib import Path

from lightning_mist.cli.output import print_json, say, show_plan
from lightning_mist.plan import describe_changes, load
from lightning_mist.units import format_seconds


def show(plan: str, /, against: str | None = None, trace: str | None = None, json: bool = False) -> None:
    """Show a plan file as a table.

    Args:
        plan: The plan file.
        against: Another plan file, to show what changes from the first to it.
        trace: Where to write a Chrome trace of the plan's schedule, run on a clock with its predicted seconds. Open it
            with https://ui.perfetto.dev or chrome://tracing.
        json: Print JSON on stdout and nothing else there.
    """
    first = load(plan)
    other = None if against is None else load(against)
    changes = None if other is None else describe_changes(first, other)
    if json:
        print_json(first, **({} if changes is None else {"changes": changes.splitlines()}))
    else:
        show_plan(first)
        if changes is not None:
            print(f"\nfrom {plan} to {against}:\n{changes}")
    if trace is not None:
        from lightning_mist.schedule import simulate_plan, to_chrome_trace

        result = simulate_plan(first)
        names = {
            group: f"stage {' and '.join(map(str, first.chunks(group)))} (ranks {', '.join(map(str, stage.devices))})"
            for group, stage in enumerate(first.stages[: first.num_groups])
        }
        text = to_chrome_trace((span for spans in result.spans for span in spans), names=names)
        Path(trace).write_text(text, encoding="utf-8")
        idle = max(result.bubble) / result.makespan if result.makespan else 0.0
        said = (
            f"simulated step: {format_seconds(result.makespan)}, the idlest stage idles for {idle:.0%} of it; "
            f"trace written to {trace}"
        )
        if json:
            say(said)
        else:
            print(f"\n{said}")
