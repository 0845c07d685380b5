"""Branch and bound over numbers of stages and microbatches."""

from lightning_mist.tuner.search.mixed_slots import MixedStages, Stages, mixed_layout, mixed_stages, space_of
from lightning_mist.tuner.search.near_optimal import COMPARED
from lightning_mist.tuner.search.pipelines import AlikePipelines, Pipelines
from lightning_mist.tuner.search.proven_bounds import ProvenBounds
from lightning_mist.tuner.search.replicas import search_copies
from lightning_mist.tuner.search.search_loop import Outcome, search_pipelines
