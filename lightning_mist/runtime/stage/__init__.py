"""One stage of an unmodified module: what it computes, what it skips, and what crosses its ends."""

from lightning_mist.runtime.stage.parameter_guard import (
    Talk,
    WrittenWeights,
    seen_backward,
    sum_of_bits,
    watched_processes,
)
from lightning_mist.runtime.stage.pipeline_stage import (
    InputSpec,
    PipelineStage,
    RankStages,
    StageOutput,
    make_stages,
    no_caches,
)
from lightning_mist.runtime.stage.unit_runner import UnitRunner, make_unit_runner
