"""Families of plans whose stages are all alike, and what their settings cost.

Array axes
    S  stages
    K  settings that all stages share
"""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.plan import OffloadRatios, Plan
from lightning_mist.tuner.space import Shape

NO_OFFLOAD = OffloadRatios()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans with stages that are all alike.

    Attributes:
        zero_stages: ZeRO stages that may be used where there are data-parallel ranks; without them there is nothing to
            shard, and the stage is 0.
        has_stages: Whether there may be several stages.
        splits_layers: Whether devices may share layers (tensor parallelism).
        recomputes: Whether layers are recomputed: ``"none"``, ``"all"``, or as many of every stage as are ``"best"``.
        cuts_batches: Whether one batch of a device may be cut into several microbatches.
        has_chunks: Whether stages may be dealt out in chunks, as far as nothing is offloaded.
        offloads: What may live in host memory.
        offloads_if_all_recomputed: What else may, where all layers are recomputed.
    """

    zero_stages: tuple[int, ...]
    has_stages: bool = False
    splits_layers: bool = False
    recomputes: Literal["none", "all", "best"] = "best"
    cuts_batches: bool = True
    has_chunks: bool = False
    offloads: tuple[OffloadRatios, ...] = (NO_OFFLOAD,)
    offloads_if_all_recomputed: tuple[OffloadRatios, ...] = ()

    @property
    def every_offload(self) -> tuple[OffloadRatios, ...]:
        """All that may live in host memory."""
        return (*self.offloads, *self.offloads_if_all_recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use.

    Attributes:
        device_bytes: Bytes of every device.
        host_bytes: Bytes of every device's part of its node's memory.
    """

    device_bytes: float
    host_bytes: float = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """The fastest plan of a family.

    Attributes:
        plan: The plan with its prediction; None if none fits.
        least_bytes: The least peak of any setting, infinite if there is none; by which nothing fits if there is no
            plan.
        least_host_bytes: The least host memory per device of any setting whose peak fits.
    """

    plan: Plan | None
    least_bytes: float
    least_host_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Stages, microbatches, and the arrangement of every stage's devices."""

    num_stages: int
    num_microbatches: int
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One plan of a family, by its seconds in closed form or a bound of them."""

    seconds: float
    grid: Grid
    checkpointed: int
    zero_stage: int
    offload: OffloadRatios
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCosts:
    """What all settings of one grid cost.

    Attributes:
        checkpointed_K, zero_K, offload_K: The settings; of offload the index among the family's.
        seconds_K: Step seconds in closed form.
        busy_SK: Seconds that every stage's devices are busy with one microbatch, without transfers.
        accumulate_SK: What of these the first microbatch saves.
        peak_K: Peak bytes of the most loaded device.
        host_K: Host bytes of the device that has most there.
    """

    checkpointed_K: IntArray
    zero_K: IntArray
    offload_K: IntArray
    seconds_K: FloatArray
    busy_SK: FloatArray
    accumulate_SK: FloatArray
    peak_K: FloatArray
    host_K: FloatArray

    def fits(self, limits: Limits) -> BoolArray:
        """Which settings fit; axis ``K``."""
        fits_K: BoolArray = (self.peak_K <= limits.device_bytes) & (self.host_K <= limits.host_bytes)
        return fits_K

    def take(self, mask_K: BoolArray) -> "GridCosts":
        """Those of some settings."""
        return GridCosts(**{item.name: getattr(self, item.name)[..., mask_K] for item in fields(self)})

    def bound(self, index: int, num_microbatches: int, chunks: int) -> float:
        """Seconds that one setting takes at least with its stages in chunks.

        A group of devices starts when the first microbatch has come through the first chunk of all groups before it,
        and these have as much to do when it has ended.
        """
        busy_S = self.busy_SK[:, index]
        before_S = (np.cumsum(busy_S) - busy_S) / chunks
        return float((before_S + num_microbatches * busy_S - self.accumulate_SK[:, index]).max())
