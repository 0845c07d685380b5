"""What to run: a plan is frozen data. No torch, no Lightning."""

from lightning_mist.plan.codec import from_json, load, save, to_json
from lightning_mist.plan.fingerprint import Fingerprint, check_plan, check_split, differences, fingerprint_of
from lightning_mist.plan.grid import plan_of
from lightning_mist.plan.module_map import Exclusion, Feature, LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.plan import (
    AS_IT_IS,
    Plan,
    Predicted,
    PredictedStage,
    ScheduleName,
    StageMethod,
    StagePlan,
    StepRates,
    StepWork,
    Transfers,
    UpdateAfter,
    step_rates,
)
from lightning_mist.plan.plan_tables import describe_changes, render, split_notes
from lightning_mist.plan.rows import (
    RowSlice,
    feeders,
    loader_of,
    loader_ranks,
    of_whole_batches,
    parts_of,
    proved_features,
    replica_of,
    replica_ranks,
    row_slice,
)
from lightning_mist.plan.search_space import COUNTS, MOST_LAYERS, OFFLOADED, SearchSpace
from lightning_mist.plan.stage_settings import (
    OFFLOAD_KINDS,
    UPDATED_KINDS,
    Checkpointing,
    CheckpointingKind,
    OffloadRatios,
    StageMesh,
    ZeroStage,
)
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit, TensorSplit
