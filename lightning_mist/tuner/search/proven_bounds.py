"""What searches have proven of pipelines, for later ones with as much memory or less.

Less memory never makes a plan faster: whatever fits in it fits in more. So the bounds of a search hold in every other
of the same space with no more of any memory, as where a plan does not fit by its estimate and is made again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_mist.tuner.inter_stage import Pipeline
from lightning_mist.tuner.search.mixed_slots import MixedStages, Stages
from lightning_mist.tuner.space import Space


@dataclass(frozen=True, slots=True)
class ProvenBounds:
    """Step seconds that no plan of pipelines goes below, by their space and the memory that there was."""

    _found: dict[Space, list[tuple[tuple[float, ...], Mapping[Pipeline, float]]]] = field(default_factory=dict)

    def of(self, stages: Stages) -> dict[Pipeline, float]:
        """What is proven of pipelines of these stages."""
        known: dict[Pipeline, float] = {}
        own = _limits(stages)
        for limits, bounds in self._found.get(stages.space, ()):
            if all(mine <= other for mine, other in zip(own, limits, strict=True)):
                known |= {key: max(bound, known.get(key, 0.0)) for key, bound in bounds.items()}
        return known

    def add(self, stages: Stages, bounds: Mapping[Pipeline, float]) -> None:
        """Remember what was proven of pipelines of these stages."""
        self._found.setdefault(stages.space, []).append((_limits(stages), bounds))


def _limits(stages: Stages) -> tuple[float, ...]:
    """Bytes that devices of every part may use, and of host memory."""
    parts = stages.parts if isinstance(stages, MixedStages) else (stages,)
    return tuple(limit for part in parts for limit in (part.memory_limit, part.host_limit))
