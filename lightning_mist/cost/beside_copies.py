"""What stages do beside copies between device and host, as far as what copies add depends on it.

Array axes
    B  stages
    R  regions
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_mist.cost.candidates import StageCandidates, StageSlot
from lightning_mist.cost.channels import CopyRates, copy_rates, interference_of
from lightning_mist.cost.compile import FloatArray
from lightning_mist.cost.exchange import Reductions, reductions, shard_nodes
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.overlap import beyond_computing
from lightning_mist.cost.regions import covered
from lightning_mist.cost.shards import UnitSeconds
from lightning_mist.cost.sums import prefix_sums
from lightning_mist.cost.time import RegionSeconds
from lightning_mist.cost.update import update_seconds
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideCopies:
    """What stages at one place do beside copies, and how fast these are.

    Attributes:
        compute: Forward and backward of every region.
        units: Communication of every unit among the ranks that shard; ``None`` if nothing is sharded.
        rates: Bytes per second of copies.
        together: Seconds of computing and communicating beside each other.
        once: Averaging gradients and giving out parameters.
        update_B: The optimizer's arithmetic.
    """

    compute: RegionSeconds
    units: UnitSeconds | None
    rates: CopyRates
    together: Callable[[FloatArray, FloatArray], FloatArray]
    once: Reductions
    update_B: FloatArray


def beside_copies(
    machine: tuple[HardwareProfile, Cluster],
    spec: ModelSpec,
    memory: MemoryModel,
    slot: StageSlot,
    candidates: StageCandidates,
    every: tuple[RegionSeconds, UnitSeconds | None],
    seams: Sequence[HardwareProfile] = (),
) -> BesideCopies:
    """What some stages do beside copies.

    Args:
        machine: How fast it is, and its devices.
        spec: The network.
        memory: What stages hold.
        slot: Their place.
        candidates: The stages.
        every: What regions compute and units communicate in every microbatch.
        seams: What devices of every part of a cluster do with nodes of other parts; nothing if devices are alike.
    """
    interference, across = interference_of(*machine), shard_nodes(machine[1], slot) > 1
    held, computed_B = memory.holdings.of(candidates), backward_seconds(spec, every[0], candidates)

    def together(compute_BR: FloatArray, network_BR: FloatArray) -> FloatArray:
        return compute_BR + beyond_computing(compute_BR, network_BR, interference, across)

    return BesideCopies(
        compute=every[0],
        units=every[1],
        rates=copy_rates(*machine),
        together=together,
        once=reductions(*machine, slot, candidates, held, computed_B, seams),
        update_B=update_seconds(machine, spec, slot, candidates, memory.holdings).update_K,
    )


def backward_seconds(spec: ModelSpec, compute: RegionSeconds, candidates: StageCandidates) -> FloatArray:
    """Seconds of computing one backward of stages, recomputation included.

    Args:
        spec: The network.
        compute: Forward and backward of every region.
        candidates: The stages.
    """
    low_B, high_B = covered(spec, candidates.start_K, candidates.end_K)
    forward, backward = prefix_sums(compute.forward_R), prefix_sums(compute.backward_R)
    first_B = candidates.start_K + 1
    again_B = forward[first_B + candidates.checkpointed_K] - forward[first_B]
    result_B: FloatArray = backward[high_B] - backward[low_B] + again_B
    return result_B
