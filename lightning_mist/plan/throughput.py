"""What one optimizer step does, whatever it takes, and the rates that follow from what it takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_mist.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one optimizer step of a network, the same under every plan, and what its devices could do at most.

    Attributes:
        model_flops: Floating-point operations of forward and backward over all rows (a multiply-add is two), without
            recomputation.
        peak_flops_per_second: What one device can do at most in the element type of the precision; 0 if not known.
        peak_source: Where that figure comes from, in words.
        roofline_seconds: The step if every operator, the optimizer's included, took the longer of its FLOPs at the peak
            and its bytes at the peak bandwidth, if the devices shared all of it evenly, and nothing waited.
        sequence_length: Tokens of each row, if rows are sequences of tokens.
    """

    model_flops: float
    peak_flops_per_second: float
    peak_source: str
    roofline_seconds: float
    sequence_length: int | None = None


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


def step_rates(plan: "Plan", step_seconds: float) -> StepRates | None:
    """What a plan achieves if its step takes so long, predicted or measured.

    Returns:
        The rates; None of a step that takes no time.
    """
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
