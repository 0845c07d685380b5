"""Branch and bound over numbers of stages and microbatches."""

from lightning_mist.tuner.search.pipelines import ProvenBounds, Stages, layout_of, space_of
from lightning_mist.tuner.search.search_loop import Outcome, search_copies, search_pipelines
