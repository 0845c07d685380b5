"""Parameters and buffers of a rank: sharded, gathered, cast, updated, and absent ones."""

from lightning_mist.runtime.parameters.absent_parameters import (
    AbsentGradient,
    KeptGradient,
    at_work,
    given_back,
    held_at,
    make_absent,
    make_present,
    present_meanwhile,
    shared_out,
    works,
)
from lightning_mist.runtime.parameters.buckets import (
    Begun,
    Bucket,
    check_dense,
    either,
    gradient_dtype,
    make_buckets,
    owned_buckets,
)
from lightning_mist.runtime.parameters.casts import CastKeeper, detached, no_kept_casts
from lightning_mist.runtime.parameters.even_shards import EvenShards, FlatShard, shown, tell_presence
from lightning_mist.runtime.parameters.gather import (
    BufferSync,
    ParameterGatherer,
    UnitGather,
    memory_of,
    unversioned,
)
from lightning_mist.runtime.parameters.masters import MasterWeights, check_gradient_types, computing
from lightning_mist.runtime.parameters.optimizer_cut import (
    OptimizerCut,
    agree_on_rest,
    clip_by_norm,
    clip_by_value,
    gather_optimizer_state,
    global_grad_norm,
    leaves_of_part,
    load_full_optimizer_state,
    own_state_dict,
    restrict_optimizer,
)
from lightning_mist.runtime.parameters.parameter_parts import AnyPart, Part, parts_of, pieces_of
from lightning_mist.runtime.parameters.unit_shards import UnitKey, UnitShards
