"""Lower bounds of stages and pipelines, and what they rule out."""

from lightning_mist.tuner.bounds.part_bounds import PartBounds
from lightning_mist.tuner.bounds.pipeline_bounds import PipelineBounds
from lightning_mist.tuner.bounds.range_bounds import least_correction
from lightning_mist.tuner.bounds.region_bounds import quick_bounds
