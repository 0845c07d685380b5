"""One stage of an unmodified module: what it computes, what it skips, and what crosses its ends."""

from lightning_mist.runtime.stage.parameter_guard import WrittenWeights, seen_backward, sum_of_bits
from lightning_mist.runtime.stage.pipeline_stage import PipelineStage
from lightning_mist.runtime.stage.processes import Talk, watched_processes
from lightning_mist.runtime.stage.stages import RankStages, make_stages, no_caches
from lightning_mist.runtime.stage.step_run import InputSpec, StageOutput
from lightning_mist.runtime.stage.unit_runner import UnitRunner, make_unit_runner
