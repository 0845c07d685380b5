"""What part of every kind of offloaded state the rank that has most offloads, and when it is updated.

Array axes
    K  candidates
    J  those of which a part is offloaded
    U  distinct ratios
    R  units, which are regions
"""

from collections.abc import Sequence

import numpy as np

from lightning_mist.cost.array_record import distinct_rows, prefix_sums
from lightning_mist.cost.candidates import OffloadCandidates, StageCandidates, StageSlot
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.regions import covered
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage


def ratios_of(candidates: StageCandidates) -> OffloadCandidates:
    """The ratios of candidates.

    Raises:
        ValueError: If they have none.
    """
    if candidates.offload is None:
        raise ValueError("candidates.offload = None: nothing is offloaded, so there are no copies")
    return candidates.offload


def defers_K(spec: ModelSpec, slots: Sequence[StageSlot], place_K: IntArray, candidates: StageCandidates) -> BoolArray:
    """Whether stages that update unit by unit do it in the next first forward: nobody may look before.

    As of :func:`lightning_mist.schedule.stage_units.defers_update`.

    Args:
        slots: Their places.
        place_K: Which of them each is at.
    """
    rules, zero_K = spec.module_map, candidates.zero_stage_K
    if rules.excludes("sharded_gradients") or rules.excludes("shards"):
        return np.zeros(len(zero_K), dtype=bool)
    is_shared_K = np.array([slot.shard_degree > 1 for slot in slots])[place_K]
    is_given_K = is_shared_K & (zero_K >= ZeroStage.OPTIMIZER) & (zero_K < ZeroStage.PARAMETERS)
    deferred_K: BoolArray = ~(is_given_K & bool(rules.excludes("sharded_parameters")))
    return deferred_K


def parts_of_ranks(memory: MemoryModel, ranks_K: IntArray, candidates: StageCandidates) -> FloatArray:
    """What part of a unit's offloaded bytes the rank that has most offloads.

    The update of a parameter happens once, however many units fetch it.

    Args:
        memory: The network, or one tensor-parallel rank's part of it.
        ranks_K: Ranks with the same parameters.
        candidates: The stages, with ratios.

    Returns:
        Of parameters, of gradients, of gradients whose parameters a rank updates, and of optimizer state; axis ``K``.
    """
    offload, states, zero_K = ratios_of(candidates), memory.states, candidates.zero_stage_K
    low_K, high_K = covered(memory.spec, candidates.start_K, candidates.end_K)

    def part(ratio_K: FloatArray, since: ZeroStage, *, trained: bool, once: bool = False) -> FloatArray:
        shards_K, part_K = (zero_K >= since) & (ranks_K > 1), np.ones(len(candidates))
        at_J = np.flatnonzero((shards_K | once) & (ratio_K > 0))
        if not len(at_J):
            return part_K
        some, ratio_J = candidates.take(at_J), ratio_K[at_J]
        most_J = states.of(some, ratio_J, ranks_K[at_J], shards_K[at_J], trained=trained).offloaded_K
        if once:
            ratios_U, row_J = distinct_rows(ratio_J)
            prefix_UR = prefix_sums(np.stack([states.unit_bytes(ratio, "trained") for (ratio,) in ratios_U.tolist()]))
            all_J = prefix_UR[row_J, high_K[at_J]] - prefix_UR[row_J, low_K[at_J]]
        else:
            all_J = states.of(some, ratio_J, 1, shards_K[at_J], trained=trained).offloaded_K
        part_K[at_J] = most_J / np.maximum(all_J, 1.0)
        return part_K

    return np.stack(
        [
            part(offload.parameters_K, ZeroStage.PARAMETERS, trained=False),
            part(offload.gradients_K, ZeroStage.GRADIENTS, trained=True),
            part(offload.gradients_K, ZeroStage.OPTIMIZER, trained=True, once=True),
            part(offload.optimizer_K, ZeroStage.OPTIMIZER, trained=True, once=True),
        ]
    )
