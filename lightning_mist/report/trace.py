"""A plan's step as a trace that Perfetto opens: what runs when, and the bytes beside it."""

from lightning_mist.estimate import memory_curves
from lightning_mist.plan import Plan
from lightning_mist.plan.plan_tables import ranges
from lightning_mist.schedule import Level, Simulation, to_chrome_trace


def trace_text(plan: Plan, simulation: Simulation) -> str:
    """A trace of a plan's step, as JSON text.

    Args:
        plan: A plan with a prediction; of earlier ones, which do not say what memory is made of, without bytes.
    """
    names = {
        group: f"stage {' and '.join(map(str, plan.chunks(group)))} (ranks {ranges(stage.devices)})"
        for group, stage in enumerate(plan.stages[: plan.num_groups])
    }
    assert plan.predicted is not None
    is_known = all(stage.needs for stage in plan.predicted.stages)
    curves = memory_curves(plan, simulation) if is_known else ()
    levels = [
        Level(
            curve.group,
            "bytes",
            float(time),
            tuple((name.removesuffix("_bytes"), float(values_E[index])) for name, values_E in curve.terms),
        )
        for curve in curves
        for index, time in enumerate(curve.times_E)
    ]
    return to_chrome_trace((span for spans in simulation.spans for span in spans), names=names, levels=levels)
