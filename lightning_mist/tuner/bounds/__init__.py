"""Lower bounds of stages and pipelines, and what they rule out."""

from lightning_mist.tuner.bounds.pipeline_bounds import PartBounds, PipelineBounds
from lightning_mist.tuner.bounds.region_bounds import quick_bounds
