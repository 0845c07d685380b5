"""Where the seconds of one optimizer step go, stage by stage."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpent:
    """Seconds of one optimizer step of a stage's devices, by what they are spent on; they add up to the step.

    Attributes:
        compute_seconds: Forwards and backwards of all microbatches.
        recompute_seconds: Forwards that backwards repeat.
        communication_seconds: What collectives and transfers between stages add to the step: whatever does not hide in
            computation.
        copies_seconds: The same of copies between device and host.
        optimizer_seconds: Passes over gradients and the optimizer's step.
        overhead_seconds: The runtime's own Python, as far as devices wait for it.
        bubble_seconds: Waiting for other stages.
    """

    compute_seconds: float
    recompute_seconds: float
    communication_seconds: float
    copies_seconds: float
    optimizer_seconds: float
    overhead_seconds: float
    bubble_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(seconds for _, seconds in self.terms)

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """Every term as ``(name, seconds)``, in the order above."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))
