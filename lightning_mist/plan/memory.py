"""What a stage does to save device memory."""

from dataclasses import dataclass

from lightning_mist.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRatios:
    """Fractions in [0, 1] of each kind of state that live in host memory between uses."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    def __post_init__(self) -> None:
        """Check that every ratio is a fraction."""
        for name in ("parameters", "gradients", "optimizer", "activations"):
            ratio = getattr(self, name)
            if not 0.0 <= ratio <= 1.0:
                raise PlanError(f"offload.{name} = {ratio}: a ratio lies in [0, 1]")

    @property
    def any(self) -> bool:
        """Whether anything is offloaded at all."""
        return max(self.parameters, self.gradients, self.optimizer, self.activations) > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Activation checkpointing of a stage: its first ``layers`` layers keep only their inputs.

    The *first* layers are chosen because backward reaches them last, when the fewest other activations are alive.
    """

    layers: int = 0

    def __post_init__(self) -> None:
        """Check that the count is not negative."""
        if self.layers < 0:
            raise PlanError(f"checkpointed_layers = {self.layers}: a count of layers is not negative")
