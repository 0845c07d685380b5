"""How a stage spreads over devices, and what it does to save their memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Literal, get_args

from lightning_mist.errors import PlanError


class ZeroStage(IntEnum):
    """What the data-parallel ranks of a stage shard (Rajbhandari et al., 2020)."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The devices of one stage and the degrees they are arranged in.

    Attributes:
        devices: Global ranks, data-parallel index slowest, then context, tensor-parallel index fastest.
        data_parallel_degree: Number of replicas of the stage that see different rows of a microbatch.
        tensor_parallel_degree: Number of devices that share every layer of the stage.
        context_parallel_degree: Number of devices that share the sequence.
        sequence_parallel: Whether norms and dropout work on sequence shards between tensor-parallel regions.
        shard_degree: Number of ranks that ZeRO shards over, if not all with the same parameters. These form groups of
            so many, one behind another; each group holds everything once, and groups average their gradients (hybrid
            sharding). ``None`` if there is one group.
    """

    devices: tuple[int, ...]
    data_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    sequence_parallel: bool = False
    shard_degree: int | None = None

    def __post_init__(self) -> None:
        degrees = (self.data_parallel_degree, self.tensor_parallel_degree, self.context_parallel_degree)
        if min(degrees) < 1:
            raise PlanError(f"degrees {degrees} (data, tensor, context): each must be at least 1")
        if len(set(self.devices)) != len(self.devices) or any(device < 0 for device in self.devices):
            raise PlanError(f"devices {list(self.devices)}: each must be named once and not be negative")
        product = degrees[0] * degrees[1] * degrees[2]
        if product != len(self.devices):
            raise PlanError(
                f"{len(self.devices)} devices with degrees {degrees} (data, tensor, context): "
                f"their product must equal the number of devices, but is {product}"
            )
        if self.sequence_parallel and self.tensor_parallel_degree == 1:
            raise PlanError("sequence_parallel needs tensor_parallel_degree of at least 2, which is 1")
        if self.shard_degree is not None:
            self._check_shards(self.shard_degree)

    def _check_shards(self, degree: int) -> None:
        ranks = self.num_peers
        if degree < 1 or ranks % degree:
            fitting = [number for number in range(2, ranks + 1) if ranks % number == 0] or [1]
            raise PlanError(
                f"shard_degree = {degree} with {ranks} ranks that have the same parameters (data x context): groups of "
                f"so many must deal them out evenly; use {' or '.join(map(str, fitting))}"
            )
        if degree == ranks:
            object.__setattr__(self, "shard_degree", None)
        elif degree == 1:
            raise PlanError(
                f"shard_degree = 1 with {ranks} ranks that have the same parameters: one rank has nobody to share "
                "with; use zero_stage = 0, which shards nothing"
            )

    @property
    def num_peers(self) -> int:
        """Number of ranks with the same parameters: data times context parallelism."""
        return self.data_parallel_degree * self.context_parallel_degree

    @property
    def num_row_peers(self) -> int:
        """Number of ranks that compute on the same rows: context times tensor parallelism."""
        return self.context_parallel_degree * self.tensor_parallel_degree

    @property
    def shares_sequence(self) -> bool:
        """Whether these hold hidden states between layers in parts along the sequence."""
        return self.sequence_parallel or self.context_parallel_degree > 1

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards over."""
        return self.shard_degree or self.num_peers


OFFLOAD_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer state",
        "activations": "activations",
        "checkpoints": "inputs of recomputed layers",
    }
)
"""Kinds of state that may be in host memory, and what they are for people."""

UPDATED_KINDS = ("parameters", "gradients", "optimizer")
"""Those of them that the update needs, which then goes unit by unit. The others are what layers keep for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRatios:
    """Fractions in [0, 1] of each kind of state that live in host memory between uses.

    Attributes:
        activations: Of what layers keep for backward.
        checkpoints: Of the inputs of recomputed layers, all that these keep; ``None`` where that of activations holds
            for them too.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    checkpoints: float | None = None

    def __post_init__(self) -> None:
        for name in OFFLOAD_KINDS:
            ratio = self.of(name)
            if not 0.0 <= ratio <= 1.0:
                raise PlanError(f"offload.{name} = {ratio}: a ratio lies in [0, 1]")
        if self.checkpoints == self.activations:
            object.__setattr__(self, "checkpoints", None)

    def of(self, kind: str) -> float:
        """The ratio of a kind of state."""
        ratio: float | None = getattr(self, kind)
        return self.activations if ratio is None else ratio

    def kept(self, *, recomputed: bool) -> float:
        """The ratio of what a layer keeps for backward."""
        return self.of("checkpoints" if recomputed else "activations")

    @property
    def told(self) -> tuple[tuple[str, float], ...]:
        """What is said of them, as ``(kind, ratio)``: those of what is offloaded, and one of checkpoints alone."""
        own = {kind: getattr(self, kind) for kind in OFFLOAD_KINDS}
        return tuple((kind, ratio) for kind, ratio in own.items() if ratio or (kind == "checkpoints" and ratio == 0.0))

    @property
    def any(self) -> bool:
        """Whether anything is offloaded at all."""
        return any(ratio > 0.0 for _, ratio in self.told)

    @property
    def moves_in_passes(self) -> bool:
        """Whether anything is that forwards and backwards need."""
        return any(kind != "optimizer" for kind, _ in self.told)

    @property
    def updates_by_units(self) -> bool:
        """Whether anything is that the update needs."""
        return max(map(self.of, UPDATED_KINDS)) > 0.0


CheckpointingKind = Literal["full", "selective"]
"""What of a layer is recomputed: all of it, or all but its matrix products, convolutions and attention."""

CHECKPOINTING_KINDS: tuple[CheckpointingKind, ...] = get_args(CheckpointingKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Activation checkpointing of a stage: its first ``layers`` layers are recomputed in backward.

    The *first* layers are chosen because backward reaches them last, when the fewest other activations are alive.

    Attributes:
        kind: What such a layer keeps: under ``"full"`` only its inputs, under ``"selective"`` also what its matrix
            products, convolutions and attention return. Without recomputed layers it is always ``"full"``.
    """

    layers: int = 0
    kind: CheckpointingKind = "full"

    def __post_init__(self) -> None:
        if self.kind not in CHECKPOINTING_KINDS:
            raise PlanError(f"checkpointing = {self.kind!r}: known are {', '.join(CHECKPOINTING_KINDS)}")
        if not self.layers:
            object.__setattr__(self, "kind", "full")
        if self.layers < 0:
            raise PlanError(f"checkpointed_layers = {self.layers}: a count of layers is not negative; give 0 for none")
