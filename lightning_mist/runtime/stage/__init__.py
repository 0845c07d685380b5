"""One stage of an unmodified module: what it computes, what it skips, and what crosses its ends."""

from lightning_mist.runtime.stage.pipeline_stage import GhostStage
from lightning_mist.runtime.stage.stage_split import TransportGroup
from lightning_mist.runtime.stage.stages import RankStages, make_stages, no_caches
from lightning_mist.runtime.stage.step_run import InputSpec, StageOutput
from lightning_mist.runtime.stage.unit_runner import UnitWalk, make_walk

__all__ = [
    "GhostStage",
    "InputSpec",
    "RankStages",
    "StageOutput",
    "TransportGroup",
    "UnitWalk",
    "make_stages",
    "make_walk",
    "no_caches",
]
