"""Families of plans whose stages are all alike, and what their settings cost.

Array axes
    S  stages
    K  settings that all stages share
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.hardware import AnyCluster, Cluster
from lightning_mist.plan import OffloadRatios, Plan
from lightning_mist.tuner.budget import host_bytes_of_each, usable_bytes
from lightning_mist.tuner.grid_ends import KnownEnds
from lightning_mist.tuner.space import Shape

NO_OFFLOAD = OffloadRatios()


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformFamily:
    """Plans with stages that are all alike.

    Attributes:
        zero_stages: ZeRO stages that may be used where there are data-parallel ranks; without them there is nothing to
            shard, and the stage is 0.
        has_stages: Whether there may be several stages.
        splits_layers: Whether devices may share layers (tensor parallelism).
        recomputes: Whether layers are recomputed: ``"none"``, ``"all"``, or as many of every stage as are ``"best"``.
        cuts_batches: Whether one batch of a device may be cut into several microbatches.
        has_chunks: Whether stages may be dealt out in chunks, as far as nothing is offloaded.
        has_whole: Whether they may be in one piece.
        offloads: What may live in host memory.
        offloads_if_all_recomputed: What else may, where all layers are recomputed.
    """

    zero_stages: tuple[int, ...]
    has_stages: bool = False
    splits_layers: bool = False
    recomputes: Literal["none", "all", "best"] = "best"
    cuts_batches: bool = True
    has_chunks: bool = False
    has_whole: bool = True
    offloads: tuple[OffloadRatios, ...] = (NO_OFFLOAD,)
    offloads_if_all_recomputed: tuple[OffloadRatios, ...] = ()

    @property
    def every_offload(self) -> tuple[OffloadRatios, ...]:
        """All that may live in host memory."""
        return (*self.offloads, *self.offloads_if_all_recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Stages, microbatches, and the arrangement of every stage's devices.

    Attributes:
        num_stages: Number of stages.
        num_microbatches: Number of microbatches.
        shape: How the devices of every stage are arranged.
        parts: The part of a cluster of unlike devices in which each stage lies; nothing if devices are alike, or the
            only stage has all of them.
    """

    num_stages: int
    num_microbatches: int
    shape: Shape
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan may use, one entry for every part of the cluster.

    Attributes:
        device_bytes: Bytes of every device.
        host_bytes: Bytes of every device's part of its node's memory.
    """

    device_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]

    @classmethod
    def of(cls, cluster: AnyCluster, memory_limit: int | None = None, host_memory_limit: int | None = None) -> "Limits":
        """The limits of a search.

        Args:
            cluster: The devices.
            memory_limit: Bytes of each device that may be used in all; of unlike devices at most what each has.
            host_memory_limit: Bytes of host memory of each node.
        """
        parts = cluster.parts

        def asked(part: Cluster) -> int | None:
            cut = memory_limit is not None and len(parts) > 1
            return min(memory_limit, part.device.memory_bytes) if memory_limit is not None and cut else memory_limit

        return cls(
            device_bytes=tuple(usable_bytes(part, asked(part)) for part in parts),
            host_bytes=tuple(host_bytes_of_each(part, host_memory_limit) for part in parts),
        )

    def stages(self, grid: Grid) -> tuple[FloatArray, FloatArray]:
        """Bytes of a device and of its host memory that every stage may use; axes ``S``."""
        found = []
        for each in (self.device_bytes, self.host_bytes):
            found.append(np.array([each[part] for part in grid.parts] or [min(each)] * grid.num_stages))
        return found[0], found[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What the least demanding setting needs of a kind of memory on the stage where most is missing, and its limit."""

    needed_bytes: float
    limit_bytes: float

    @property
    def missing(self) -> float:
        """Bytes that are missing, not more than 0 if it fits; without a limit all that are needed."""
        return self.needed_bytes - (self.limit_bytes if np.isfinite(self.limit_bytes) else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """The fastest plan of a family.

    Attributes:
        plan: The plan with its prediction; None if none fits.
        device: What the setting needs of its devices that needs least; None if there is no setting.
        host: What the setting needs of host memory that needs least of it, among those that fit on their devices; None
            if there is none.
    """

    plan: Plan | None
    device: Shortage | None
    host: Shortage | None


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
        peak_SK: Peak bytes of every stage's most loaded device.
        host_SK: Bytes that it has in host memory.
    """

    checkpointed_K: IntArray
    zero_K: IntArray
    offload_K: IntArray
    seconds_K: FloatArray
    busy_SK: FloatArray
    accumulate_SK: FloatArray
    peak_SK: FloatArray
    host_SK: FloatArray

    def take(self, mask_K: BoolArray) -> "GridCosts":
        """Those of some settings."""
        return GridCosts(**{item.name: getattr(self, item.name)[..., mask_K] for item in fields(self)})

    def least(self, uses_SK: FloatArray, limit_S: FloatArray) -> Shortage | None:
        """What the setting that misses least uses where it misses most; None if there is no setting."""
        missing_SK = uses_SK - np.where(np.isfinite(limit_S), limit_S, 0.0)[:, None]
        if not missing_SK.size:
            return None
        index = int(missing_SK.max(axis=0).argmin())
        stage = int(missing_SK[:, index].argmax())
        return Shortage(needed_bytes=float(uses_SK[stage, index]), limit_bytes=float(limit_S[stage]))

    def bound(self, index: int, num_microbatches: int, chunks: int) -> float:
        """Seconds that one setting takes at least with its stages in chunks.

        A group of devices starts when the first microbatch has come through the first chunk of all groups before it,
        and these have as much to do when it has ended.
        """
        busy_S = self.busy_SK[:, index]
        before_S = (np.cumsum(busy_S) - busy_S) / chunks
        return float((before_S + num_microbatches * busy_S - self.accumulate_SK[:, index]).max())


@dataclass(frozen=True, slots=True)
class KnownGrids:
    """What does not depend on limits, by what it depends on.

    Attributes:
        costs: What all settings of a grid cost.
        peaks: Peak bytes of the first stage under every setting.
        floors: Seconds that its devices are busy at least, or those of the last stage.
        least: Seconds that plans of a grid take at least with so many recomputed layers of every stage, in at most so
            many chunks.
        ends: What stages at the ends of grids hold and take, which does not depend on the batch either.
    """

    costs: dict[Hashable, GridCosts] = field(default_factory=dict)
    peaks: dict[Hashable, FloatArray] = field(default_factory=dict)
    floors: dict[Hashable, FloatArray] = field(default_factory=dict)
    least: dict[tuple[Grid, int, int], float] = field(default_factory=dict)
    ends: KnownEnds = field(default_factory=KnownEnds)
