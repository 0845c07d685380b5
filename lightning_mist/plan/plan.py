"""A plan: everything the runtime needs to know about how to train, as frozen data; and what its step achieves."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import gcd
from typing import Any, Literal, get_args

from lightning_mist.errors import PlanError
from lightning_mist.plan.stage_settings import (
    CHECKPOINTING_KINDS,
    UPDATED_KINDS,
    Checkpointing,
    CheckpointingKind,
    OffloadRatios,
    StageMesh,
    ZeroStage,
)

ScheduleName = Literal["1f1b", "gpipe", "interleaved-1f1b", "zb-h1"]
"""Names of the pipeline schedules that can be generated."""

SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

Transfers = Literal["beside", "within"]
"""Whether transfers between stages move beside computation, as between devices, or within it, as between processes that
copy with the cores that they compute with."""

UpdateAfter = Literal["own", "last", "all"]
"""Which groups of devices must have reduced their gradients before one starts its optimizer: itself, also the one of
the last stage, or all."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class StageMethod:
    """How a stage computes what it computes, whatever it is of a network, and however many layers are recomputed."""

    checkpointing: CheckpointingKind = "full"
    tail_chunks: int = 1

    @property
    def code(self) -> int:
        """A number that stands for it in arrays."""
        return CHECKPOINTING_KINDS.index(self.checkpointing) + len(CHECKPOINTING_KINDS) * (self.tail_chunks - 1)

    @classmethod
    def of_code(cls, code: int) -> "StageMethod":
        """What a number stands for."""
        chunks, kind = divmod(code, len(CHECKPOINTING_KINDS))
        return cls(checkpointing=CHECKPOINTING_KINDS[kind], tail_chunks=chunks + 1)

    def keeps_all(self, recomputed: Any) -> Any:
        """Whether layers and what is around them run as they are, by the number of recomputed layers or an array."""
        return (recomputed == 0) & (self.tail_chunks == 1)

    def settings(self, recomputed: int) -> dict[str, Any]:
        """The fields of a stage's plan that say so, with so many recomputed layers."""
        kept = Checkpointing(layers=recomputed, kind=self.checkpointing)
        return {"checkpointing": kept, "tail_chunks": self.tail_chunks}


AS_IT_IS = StageMethod()
"""What is recomputed is so as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        layers: Half-open range of layer positions in execution order. What runs before the first layer goes with the
            first stage, what runs after the last layer with the last stage.
        microbatch_size: Rows (samples) that each data-parallel rank of this stage sees per microbatch.
        tail_chunks: Into how many chunks of tokens a microbatch is cut for what runs behind the last layer, or of rows
            where it has no tokens to cut: chunk after chunk runs forward and backward there once the layers have run
            forward for all of them.
    """

    layers: tuple[int, int]
    mesh: StageMesh
    microbatch_size: int
    zero_stage: ZeroStage = ZeroStage.NONE
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    offload: OffloadRatios = field(default_factory=OffloadRatios)
    tail_chunks: int = 1

    def __post_init__(self) -> None:
        first, end = self.layers
        if not 0 <= first <= end:
            raise PlanError(f"layers {list(self.layers)}: a half-open range [first, end) has 0 <= first <= end")
        if self.microbatch_size < 1:
            raise PlanError(f"microbatch_size = {self.microbatch_size}: at least one row is needed")
        if self.mesh.shard_degree is not None and self.zero_stage == ZeroStage.NONE:
            raise PlanError(
                f"shard_degree = {self.mesh.shard_degree} with zero_stage = 0, which shards nothing: use zero_stage = "
                "1, 2 or 3, or leave shard_degree out"
            )
        if self.checkpointing.layers > self.num_layers:
            raise PlanError(
                f"checkpointed_layers = {self.checkpointing.layers} in a stage of {self.num_layers} layers: "
                f"at most {self.num_layers} can be checkpointed; give so many or fewer"
            )
        kept = [(kind, ratio) for kind, ratio in self.offload.told if kind not in UPDATED_KINDS]
        if self.checkpointing.kind == "selective" and kept:
            raise PlanError(
                f"offload.{kept[0][0]} = {kept[0][1]} with checkpointing = 'selective': what that keeps stays on the "
                "device; use 0, or checkpointing = 'full'"
            )
        if self.tail_chunks < 1:
            raise PlanError(f"tail_chunks = {self.tail_chunks}: at least one chunk is needed; use 1 for none")
        if self.tail_chunks > 1 and self.mesh.num_row_peers > 1:
            raise PlanError(
                f"tail_chunks = {self.tail_chunks} where {self.mesh.num_row_peers} devices share rows or layers: what "
                "is behind the last layer is not cut there; use tail_chunks = 1"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.layers[1] - self.layers[0]

    @property
    def devices(self) -> tuple[int, ...]:
        """Global ranks of the stage."""
        return self.mesh.devices

    @property
    def data_parallel_degree(self) -> int:
        """Number of data-parallel replicas of the stage."""
        return self.mesh.data_parallel_degree

    def kept_ratio(self, layer: int) -> float:
        """The share of what a layer keeps for backward that is in host memory meanwhile.

        What a later stage receives, which is what its first layer is recomputed from, stays until its gradient leaves.
        """
        is_recomputed = layer < self.layers[0] + self.checkpointing.layers
        return 0.0 if is_recomputed and layer == self.layers[0] > 0 else self.offload.kept(recomputed=is_recomputed)

    @property
    def method(self) -> StageMethod:
        """How it computes what it computes."""
        return StageMethod(checkpointing=self.checkpointing.kind, tail_chunks=self.tail_chunks)

    def part(self, first: int, end: int, recomputed: int) -> "StagePlan":
        """Some of its layers as a stage, computed in the same way, with so many recomputed."""
        method = self.method if end == self.layers[1] else replace(self.method, tail_chunks=1)
        return replace(self, layers=(first, end), **method.settings(recomputed))

    def on_rows(self, rows: int, mesh: StageMesh | None = None) -> "StagePlan":
        """The same stage with other rows in a microbatch, and perhaps otherwise on its devices.

        What is behind the last layer is cut into as many chunks as these rows allow, if those may be of rows.
        """
        mesh = mesh or self.mesh
        chunks = self.tail_chunks if mesh.num_row_peers == 1 else 1
        chunks = chunks if self.microbatch_size % self.tail_chunks else gcd(chunks, rows)
        return replace(self, mesh=mesh, microbatch_size=rows, tail_chunks=chunks)

    def with_zero(self, level: int) -> "StagePlan":
        """The same stage with another ZeRO stage."""
        mesh = self.mesh if level else replace(self.mesh, shard_degree=None)
        return replace(self, mesh=mesh, zero_stage=ZeroStage(level))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The work of one optimizer step of a network, the same under every plan, and what its devices could do at most.

    Attributes:
        model_flops: Floating-point operations of forward and backward over all rows (a multiply-add is two), without
            recomputation.
        peak_flops_per_second: What one device can do at most in the element type of the precision; 0 if not known.
        peak_source: Where that figure comes from, in words.
        roofline_seconds: The step if every operator, the optimizer's included, took the longer of its FLOPs at the peak
            and its bytes at the peak bandwidth, if the devices shared all of it evenly, and nothing waited.
        sequence_length: Tokens of each row, if rows are sequences of tokens.
    """

    model_flops: float
    peak_flops_per_second: float
    peak_source: str
    roofline_seconds: float
    sequence_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStage:
    """What the cost model says of one stage.

    Attributes:
        steady_seconds: Forward plus backward of a middle microbatch (``t``), as the closed form of the step has it:
            what is exchanged with other stages as if these were like this one. The clock knows better, and has its
            seconds of ``breakdown``.
        boundary_seconds: Extra time of the first and last microbatch (``d``), likewise.
        forward_seconds: Forward of one microbatch.
        backward_seconds: Backward of one microbatch, recomputation included.
        peak_bytes: Peak memory of the stage's most loaded device.
        breakdown: Bytes of that peak by term, and seconds by term, as ``(name, value)`` with names ending in
            ``_bytes`` or ``_seconds``.
        spent: Where the seconds of one step of the stage's devices go, as ``(name, seconds)``; they add up to the step.
            Names are those of :class:`~lightning_mist.cost.plan_clock.StageSpent`. Chunks that share devices all have
            those of these devices. Empty in plans that were predicted before this was known.
        needs: What the memory of the stage's devices is made of, as ``(name, bytes)``: see
            :mod:`~lightning_mist.cost.memory.stage_bytes`. From it and the schedule follow the bytes over the step.
            Empty in plans that were predicted before this was known.
        units: What happens unit by unit (head, layers, tail), as ``(name, numbers)``: ``channels.PASS``, rows as of
            :func:`~lightning_mist.cost.time.channel_rows`, each behind how many units are alike, and
            ``channels.reduce``; ``bytes.WHAT``, of each unit in the order of forward its seconds and both of
            :meth:`~lightning_mist.cost.memory.MemoryModel.of_units`. Empty where nobody asked for it
            (:func:`~lightning_mist.cost.with_units`).
    """

    steady_seconds: float
    boundary_seconds: float
    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    breakdown: tuple[tuple[str, float], ...] = ()
    spent: tuple[tuple[str, float], ...] = ()
    needs: tuple[tuple[str, float], ...] = ()
    units: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the cost model says of a whole plan.

    Attributes:
        transfers: How transfers move on the machine that the prediction is for.
        update_after: Whom the optimizer's step waits for there.
        work: What the step does, from which rates follow. None in plans that were predicted before this was known.
    """

    step_seconds: float
    stages: tuple[PredictedStage, ...]
    transfers: Transfers = "beside"
    update_after: UpdateAfter = "own"
    work: StepWork | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("transfers", self.transfers, get_args(Transfers)),
            ("update_after", self.update_after, get_args(UpdateAfter)),
        ):
            if value not in known:
                raise PlanError(f"{name} = {value!r}: known are {', '.join(known)}")

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device of all."""
        return max(stage.peak_bytes for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train: stages, microbatches, schedule, and what was predicted.

    What follows from a plan, such as its hash, is computed once, because that takes long for thousands of devices.

    Attributes:
        global_batch_size: Rows that one Lightning batch brings over all data loaders.
        num_microbatches: Number of microbatches that one batch is cut into (``G``).
        stages: Pipeline stages in order. Under ``"interleaved-1f1b"`` several stages share the same devices: stages
            ``i``, ``i + P``, ``i + 2 P``.. of ``P`` groups of devices are the *chunks* of group ``i``.
        data_parallel_size: How many distinct batches are loaded at once. As many equal groups of neighbouring devices
            each load one of them. None for one batch per device, as under plain data parallelism.
        predicted: The cost model's figures, if it made the plan.
        fingerprint: What the plan was made for, as ``(name, value)``; compared before the plan runs.
    """

    global_batch_size: int
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    schedule: ScheduleName = "1f1b"
    data_parallel_size: int | None = None
    predicted: Predicted | None = None
    fingerprint: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule = {self.schedule!r}: known schedules are {', '.join(SCHEDULES)}")
        if self.global_batch_size < 1 or self.num_microbatches < 1:
            raise PlanError(
                f"global_batch_size = {self.global_batch_size}, num_microbatches = {self.num_microbatches}: "
                "both must be at least 1"
            )
        if not self.stages:
            raise PlanError("a plan without stages: at least one stage is needed")
        self._check_layers()
        self._check_rows()
        self._check_devices()
        self._check_loaders()
        if self.predicted is not None and len(self.predicted.stages) != len(self.stages):
            raise PlanError(
                f"predicted.stages has {len(self.predicted.stages)} entries for {len(self.stages)} stages: "
                "they must be as many"
            )

    @property
    def prediction(self) -> Predicted:
        """The cost model's figures, of a plan that has some."""
        if self.predicted is None:
            raise PlanError("the plan predicts nothing: plan again with `lightning-mist plan`")
        return self.predicted

    @property
    def is_plain(self) -> bool:
        """Whether the plan is what torch's DistributedDataParallel does by itself."""
        stage = self.stages[0]
        return (
            self.num_stages == 1
            and self.num_microbatches == 1
            and self.data_parallel_size is None
            and stage.mesh.tensor_parallel_degree == 1
            and stage.zero_stage == ZeroStage.NONE
            and stage.method.keeps_all(stage.checkpointing.layers)
            and not stage.offload.any
        )

    def _check_layers(self) -> None:
        end = 0
        for index, stage in enumerate(self.stages):
            if stage.layers[0] != end:
                raise PlanError(
                    f"stage {index} starts at layer {stage.layers[0]}: it must start at {end}, where the stage before "
                    "it ends"
                )
            if stage.tail_chunks > 1 and index < len(self.stages) - 1:
                raise PlanError(
                    f"stage {index}: tail_chunks = {stage.tail_chunks}, and what is behind the last layer runs on "
                    "the last stage; use 1"
                )
            if stage.num_layers == 0 and len(self.stages) > 1:
                raise PlanError(f"stage {index} has no layers: in a pipeline every stage needs at least one")
            end = stage.layers[1]

    def _check_rows(self) -> None:
        for index, stage in enumerate(self.stages):
            rows = stage.microbatch_size * stage.data_parallel_degree * self.num_microbatches
            if rows != self.global_batch_size:
                raise PlanError(
                    f"stage {index}: microbatch_size {stage.microbatch_size} x data_parallel_degree "
                    f"{stage.data_parallel_degree} x num_microbatches {self.num_microbatches} = {rows}: "
                    f"it must equal global_batch_size {self.global_batch_size}"
                )

    def _check_devices(self) -> None:
        if self.schedule == "interleaved-1f1b":
            self._check_chunks()
        devices = sorted(device for stage in self.stages[: self.num_groups] for device in stage.devices)
        if devices != list(range(len(devices))):
            raise PlanError(
                f"devices {devices} over all stages: every rank from 0 to {len(devices) - 1} must be in exactly one"
            )

    def _check_loaders(self) -> None:
        loaders, world = self.data_parallel_size, self.world_size
        if loaders is None:
            return
        if not 1 <= loaders < world or world % loaders:
            raise PlanError(
                f"data_parallel_size = {loaders} on {world} devices: equal groups of them load the same samples, so it "
                f"must divide {world} and be less; leave it out if every device loads its own"
            )
        for index, stage in enumerate(self.stages):
            parts = self.num_microbatches * stage.data_parallel_degree
            if parts % loaders:
                raise PlanError(
                    f"stage {index}: data_parallel_size = {loaders} with num_microbatches {self.num_microbatches} x "
                    f"data_parallel_degree {stage.data_parallel_degree} = {parts} parts: each is of one batch, so "
                    f"their number must be a multiple of {loaders}; use data_parallel_size = {gcd(parts, loaders)}"
                )

    def _check_chunks(self) -> None:
        groups = self.num_groups
        if len(self.stages) == groups or len(self.stages) % groups:
            raise PlanError(
                f"schedule = 'interleaved-1f1b' with {len(self.stages)} stages on {groups} groups of devices: each "
                "group needs the same number of stages, at least 2; stages i, i + P, i + 2 P.. name the same devices"
            )
        if self.num_microbatches % groups:
            raise PlanError(
                f"schedule = 'interleaved-1f1b' with {self.num_microbatches} microbatches on {groups} groups of "
                f"devices: microbatches go through the chunks {groups} at a time, so their number must be a multiple; "
                f"use {-(-self.num_microbatches // groups) * groups}"
            )
        for index, stage in enumerate(self.stages):
            first = self.stages[index % groups]
            if (stage.mesh, stage.zero_stage, stage.offload) != (first.mesh, first.zero_stage, first.offload):
                raise PlanError(
                    f"stage {index} shares devices with stage {index % groups}: chunks of one group of devices must "
                    "agree in degrees, zero_stage and offload"
                )

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @cached_property
    def num_groups(self) -> int:
        """Number of groups of devices (``P``): as many as stages, but for chunks that share their devices."""
        if self.schedule != "interleaved-1f1b":
            return len(self.stages)
        return len(dict.fromkeys(frozenset(stage.devices) for stage in self.stages))

    def group_of(self, stage: int) -> int:
        """The group of devices that runs a stage."""
        return stage % self.num_groups

    def chunks(self, group: int) -> tuple[int, ...]:
        """The stages that a group of devices runs, ascending."""
        return tuple(range(group, self.num_stages, self.num_groups))

    @property
    def num_layers(self) -> int:
        """Number of layers over all stages."""
        return self.stages[-1].layers[1]

    @cached_property
    def world_size(self) -> int:
        """Number of devices over all stages."""
        return sum(len(stage.devices) for stage in self.stages[: self.num_groups])

    @property
    def shares_both_ways(self) -> bool:
        """Whether devices share layers and devices share rows, here or on other stages."""
        meshes = [stage.mesh for stage in self.stages]
        is_tensor = any(mesh.tensor_parallel_degree > 1 for mesh in meshes)
        return is_tensor and any(mesh.context_parallel_degree > 1 for mesh in meshes)

    @property
    def num_loaders(self) -> int:
        """Number of distinct batches that are loaded at once."""
        return self.data_parallel_size or self.world_size

    @cached_property
    def num_replicas(self) -> int:
        """Number of copies of the pipeline that share no batch.

        This is the greatest common divisor of the data-parallel degrees and the number of loaders.
        """
        return gcd(self.num_loaders, *(stage.data_parallel_degree for stage in self.stages))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The layer range of every stage."""
        return tuple(stage.layers for stage in self.stages)

    def stage_of(self, rank: int) -> int:
        """Index of the stage that a global rank belongs to: the first, where chunks share devices. Also its group."""
        return self.place_of(rank)[0]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The stage of a global rank, as :meth:`stage_of` has it, and its index among the devices of that."""
        if rank not in self._places:
            raise PlanError(f"rank {rank} is in no stage: the plan is for {self.world_size} devices")
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        groups = enumerate(self.stages[: self.num_groups])
        return {rank: (stage, index) for stage, found in groups for index, rank in enumerate(found.devices)}

    def __hash__(self) -> int:
        """The hash of all fields."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: hashes of text differ from process to process."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """What a step of so many seconds achieves.

    Attributes:
        rows_per_second: Rows (samples) over all devices.
        tokens_per_second: Tokens over all devices; None where rows are no sequences of tokens.
        flops_per_second: Model FLOPs of each device; None where they are not known.
        utilisation: The same as part of the device's peak, the model FLOPs utilisation; None where that is not known.
        roofline_ratio: How many times as long as the roofline the step takes; None where that is not known.
    """

    step_seconds: float
    rows_per_second: float
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    utilisation: float | None = None
    roofline_ratio: float | None = None


def step_rates(plan: Plan, step_seconds: float) -> StepRates | None:
    """What a plan achieves if its step takes so long, predicted or measured; None of a step that takes no time."""
    if step_seconds <= 0:
        return None
    rows = plan.global_batch_size / step_seconds
    work = None if plan.predicted is None else plan.predicted.work
    if work is None:
        return StepRates(step_seconds=step_seconds, rows_per_second=rows)
    flops = work.model_flops / step_seconds / plan.world_size
    return StepRates(
        step_seconds=step_seconds,
        rows_per_second=rows,
        tokens_per_second=None if work.sequence_length is None else rows * work.sequence_length,
        flops_per_second=flops,
        utilisation=flops / work.peak_flops_per_second if work.peak_flops_per_second > 0 else None,
        roofline_ratio=step_seconds / work.roofline_seconds if work.roofline_seconds > 0 else None,
    )
