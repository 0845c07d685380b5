"""Seconds of stages: computing, communicating, copying, updating, and all of them at once."""

from lightning_mist.cost.time.communication import (
    EXCHANGED,
    SeamEnd,
    bucketed_seconds,
    context_seconds,
    cut_key,
    cut_seconds,
    reductions,
    replicate_seconds,
    shard_nodes,
    tied_seconds,
    unit_seconds,
)
from lightning_mist.cost.time.offload_loads import CopyPlace, CopyStages, unit_loads
from lightning_mist.cost.time.offload_seconds import ChannelRows, CopySeconds, channel_rows, copy_seconds
from lightning_mist.cost.time.optimizer_step import step_seconds_once, update_seconds
from lightning_mist.cost.time.overlap import (
    COMPUTE,
    NETWORK,
    TO_DEVICE,
    TO_HOST,
    CopyRates,
    beyond_computing,
    copy_rates,
    interference_of,
    weights_of_passes,
)
from lightning_mist.cost.time.pass_seconds import UNSHARDED, Beside, PassKind, RowSums, shared_seconds
from lightning_mist.cost.time.region_times import (
    RegionSeconds,
    collective_seconds,
    compute_dtype,
    compute_rate,
    region_seconds,
    split_seconds,
)
from lightning_mist.cost.time.runtime_overheads import SPLIT_BACKWARD, overhead_seconds
from lightning_mist.cost.time.stage_seconds import (
    TOLD,
    StageSeconds,
    computation_factor,
    corrected_regions,
    corrected_terms,
)
