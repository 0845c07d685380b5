"""Bytes of stages: held, saved, in flight, working, offloaded."""

from lightning_mist.cost.memory.held_parameters import HeldBytes, Holdings, SharedOut
from lightning_mist.cost.memory.interleaved_phases import (
    COUNTED,
    Situation,
    counts_of_groups,
    situations_in_order,
    situations_of_groups,
)
from lightning_mist.cost.memory.memory_model import BUCKET_BYTES, TERMS, MemoryModel, StageMemory, phases_of
from lightning_mist.cost.memory.offload_bytes import (
    BUFFERS,
    host_bytes,
    host_microbatch_bytes,
    host_state_bytes,
    in_flight,
)
from lightning_mist.cost.memory.offload_combinations import OffloadParts, Ratios
from lightning_mist.cost.memory.offload_shares import OffloadedBytes, StateShares
from lightning_mist.cost.memory.phases import Phase, phases_in_order, stage_phases
from lightning_mist.cost.memory.stage_bytes import Bytes, NeedTerms, PeakParts, StageNeeds, need_terms, needs_of
from lightning_mist.cost.memory.unit_bytes import bytes_of_units
