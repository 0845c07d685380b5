"""What the search asks of the pipelines of a search space, and the answers where all devices are alike.

For unlike devices see :class:`lightning_mist.tuner.search.mixed_slots.MixedStages`.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Protocol

import numpy as np

from lightning_mist.cost import StageCostModel
from lightning_mist.tuner.bounds import PartBounds, PipelineBounds, quick_bounds
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.inter_stage import Family, InterStageProblem, Pipeline, PipelineGroup
from lightning_mist.tuner.space import Space, places_behind


class Pipelines(Protocol):
    """The pipelines of a search space."""

    space: Space

    @property
    def groups(self) -> tuple[PipelineGroup, ...]:
        """Every pipeline, those together that are solved together."""

    def quick_bounds(self) -> dict[Pipeline, float]:
        """Step seconds that no plan of each pipeline goes below, whatever memory it needs."""

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let stages offload these fractions of each kind of state, until ``deadline``."""

    def single(self, num_microbatches: int, *, below: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds."""

    def family(self, group: PipelineGroup, counts: Sequence[int], *, below: float) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have."""


class AlikePipelines:
    """The pipelines of a search space on devices that are all alike."""

    def __init__(self, intra: IntraStage) -> None:
        assert isinstance(intra.model, StageCostModel)
        self.intra, self.space = intra, intra.space
        own = PartBounds(model=intra.model, space=intra.space, slot_of=intra.slot, memory_limit=intra.memory_limit)
        sizes = intra.space.num_layers, (intra.space.world_size,)
        self.bounds = PipelineBounds(parts=(own,), num_layers=sizes[0], num_devices=sizes[1])
        self.try_ratios(intra.space.offload_ratios)

    @cached_property
    def groups(self) -> tuple[PipelineGroup, ...]:
        """Every pipeline, those together whose stages cost the same but for how many are behind them."""
        counts: dict[tuple[int, int], list[int]] = {}
        for num_stages, num_microbatches in self.space.pipelines():
            # One stage has nothing to send, and equal stages have other layers with every number of stages.
            kind = num_stages if self.space.search.equal_stages else min(num_stages, 2)
            counts.setdefault((kind, num_microbatches), []).append(num_stages)
        return tuple(
            PipelineGroup(num_microbatches, (), tuple(sorted(stages)))
            for (_, num_microbatches), stages in sorted(counts.items())
        )

    def quick_bounds(self) -> dict[Pipeline, float]:
        """Step seconds that no plan of each pipeline goes below, whatever memory it needs."""
        return {Pipeline(*key, ()): bound for key, bound in quick_bounds(self.intra, self.space).items()}

    def lower_bound(self, group: PipelineGroup, below: float, deadline: float) -> float:
        """Step seconds that no plan of a group that fits goes below, as far as they are less than ``below``."""
        return self.bounds.bound(group, below, deadline)

    def try_ratios(self, ratios: Sequence[float], deadline: float = np.inf) -> None:
        """Let stages, and bounds, offload these fractions of each kind of state, until ``deadline``."""
        self.intra.try_ratios(ratios, deadline)
        self.bounds.let_offload(frozenset(self.space.search.offloaded if ratios else ()))

    def single(self, num_microbatches: int, *, below: float) -> InterStageProblem:
        """The choices of the only stage, without those that take at least ``below`` seconds."""
        return InterStageProblem(
            num_layers=self.space.num_layers,
            num_devices=(self.space.world_size,),
            num_microbatches=num_microbatches,
            slots=(self.intra.frontier(0, 1, num_microbatches, below / num_microbatches),),
        )

    def family(self, group: PipelineGroup, counts: Sequence[int], *, below: float) -> Family:
        """The choices of all stages, without those that only plans of at least ``below`` seconds can have."""
        num_microbatches = group.num_microbatches
        sizes = self.space.num_layers, (self.space.world_size,)
        if below == np.inf:
            frontier = partial(self.intra.frontier, num_microbatches=num_microbatches)
            return Family.of(*sizes, num_microbatches, counts, frontier)
        found = self.bounds.open_stages(group, counts, below)
        places = [*places_behind(found.counts), *((0, count) for count in found.counts)]
        asked = [(*place, (), found.of(*place)) for place in places]
        slots = self.intra.frontiers(asked, num_microbatches, found.slowest)
        choices = dict(zip(places, slots, strict=True))
        return Family.of(*sizes, num_microbatches, found.counts, lambda *place: choices[place])
