"""Lower bounds of stages and pipelines, and what they rule out."""

from lightning_mist.tuner.bounds.pipeline_bounds import PipelineBounds, quick_bounds
from lightning_mist.tuner.bounds.range_bounds import least_correction
from lightning_mist.tuner.bounds.stage_bounds import PartBounds
