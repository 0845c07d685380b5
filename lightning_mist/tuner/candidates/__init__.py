"""Ways to run the stage of a slot, as arrays: evaluated, feasible, not dominated."""

from lightning_mist.tuner.candidates.candidate_tables import ROOM, Table
from lightning_mist.tuner.candidates.choices import (
    ANY_SEAMS,
    BEHIND,
    EVERY_PART,
    FRONT,
    SlotChoices,
    non_dominated,
)
from lightning_mist.tuner.candidates.intra_stage import IntraStage
from lightning_mist.tuner.candidates.offload_search import RatioGrid, TimeIsUpError, may_offload
