"""What a step of so many seconds achieves: rows, tokens and floating-point operations per second."""

from dataclasses import dataclass

from lightning_mist.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What a step of so many seconds achieves.

    Attributes:
        rows_per_second: Rows (samples) over all devices.
        tokens_per_second: Tokens over all devices; None where rows are no sequences of tokens.
        flops_per_second: Model FLOPs of each device; None where they are not known.
        utilisation: The same as part of the device's peak, the model FLOPs utilisation; None where that is not known.
        roofline_ratio: How many times as long as the roofline the step takes; None where that is not known.
    """

    step_seconds: float
    rows_per_second: float
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    utilisation: float | None = None
    roofline_ratio: float | None = None


def step_rates(plan: Plan, step_seconds: float) -> StepRates | None:
    """What a plan achieves if its step takes so long, predicted or measured; None of a step that takes no time."""
    if step_seconds <= 0:
        return None
    rows = plan.global_batch_size / step_seconds
    work = None if plan.predicted is None else plan.predicted.work
    if work is None:
        return StepRates(step_seconds=step_seconds, rows_per_second=rows)
    flops = work.model_flops / step_seconds / plan.world_size
    return StepRates(
        step_seconds=step_seconds,
        rows_per_second=rows,
        tokens_per_second=None if work.sequence_length is None else rows * work.sequence_length,
        flops_per_second=flops,
        utilisation=flops / work.peak_flops_per_second if work.peak_flops_per_second > 0 else None,
        roofline_ratio=step_seconds / work.roofline_seconds if work.roofline_seconds > 0 else None,
    )
