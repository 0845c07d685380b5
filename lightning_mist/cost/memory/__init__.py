"""Bytes of stages: held, saved, in flight, working, offloaded."""

from lightning_mist.cost.memory.held_parameters import (
    ALIGNMENT_BYTES,
    BUCKETS_IN_FLIGHT,
    HeldBytes,
    Holdings,
    SharedOut,
)
from lightning_mist.cost.memory.memory_model import (
    TERMS,
    StageMemory,
    device_memory,
    moments_of,
)
from lightning_mist.cost.memory.moments import Moment, Moments, device_moments, in_flight, moments_in_order
from lightning_mist.cost.memory.offload_bytes import BUFFERS, LEAST_BYTES, MemoryModel, OffloadParts, Ratios
from lightning_mist.cost.memory.offload_shares import OffloadedBytes, StateShares
from lightning_mist.cost.memory.stage_bytes import (
    Bytes,
    NeedTerms,
    PeakParts,
    StageNeeds,
    Updates,
    need_terms,
    needs_of,
    parts_of,
    terms_at,
)
