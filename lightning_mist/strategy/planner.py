"""What one planning works with: the module, its batch, and ways to ask the user's step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.model import (
    LayerSeconds,
    ModelSpec,
    attach_seconds,
    map_module,
    measured_sizes,
    time_layers,
    time_update,
    trace_model,
    whole_tensor_reason,
)
from lightning_mist.model.initial import InitialValues
from lightning_mist.plan import (
    Exclusion,
    Feature,
    Fingerprint,
    ModuleMap,
    fingerprint_of,
)
from lightning_mist.runtime.batches import batch_rows, slice_rows
from lightning_mist.runtime.selfcheck import check_microbatch_invariance
from lightning_mist.strategy import machine
from lightning_mist.strategy.decision import PlanRequest
from lightning_mist.strategy.learning import Basis, with_corrections
from lightning_mist.strategy.progress import Progress
from lightning_mist.strategy.splitting import with_splits
from lightning_mist.strategy.together import alike, union
from lightning_mist.strategy.user_code import user_exclusions
from lightning_mist.tuner import TuneResult

_FEATURES: tuple[Feature, ...] = (
    "pipeline",
    "microbatches",
    "checkpointing",
    "tensor",
    "sequence",
    "sharded_gradients",
    "sharded_parameters",
)


@dataclass(slots=True, kw_only=True)
class Planner:
    """The state of one planning: what to plan for, and how to call the user's step."""

    trainer: Any
    strategy: Any
    request: PlanRequest
    progress: Progress
    plain: str | None
    batch: Any
    call: Callable[[Any], Any]
    initial: InitialValues | None
    cluster: AnyCluster
    spec: ModelSpec | None = None
    basis: Basis | None = None

    def lean(self, found: ModuleMap, *, alone: bool = False) -> AbstractContextManager[None]:
        """Inside, the module can run on real numbers, on every rank or on rank 0 alone."""
        return nullcontext() if self.initial is None else self.initial.lean(found.blocks, alone=alone)

    @property
    def module(self) -> Any:
        """The user's module."""
        return self.strategy.lightning_module

    def map(self) -> ModuleMap:
        """Where the module can be cut, with what the user's other choices rule out."""
        if self.plain is not None and not self.module.automatic_optimization:
            found = ModuleMap(step="training_step", blocks=(), outputs=(), cuts=(), parameters=())
        else:
            rows = batch_rows(self.batch)
            smaller = slice_rows(self.batch, 0, rows - 1) if rows is not None and rows > 1 else None
            found = map_module(self.module, self.call, self.batch, second_batch=smaller, blocks=self.request.blocks)
        if self.plain is None:
            own = union(user_exclusions(self.trainer, self.strategy.optimizers))
            found = replace(found, exclusions=(*found.exclusions, *own))
        else:
            extra = tuple(Exclusion(feature=feature, reason=self.plain) for feature in _FEATURES)
            found = replace(found, exclusions=found.exclusions + extra)
        for optimizer in self.strategy.optimizers:
            reason = whole_tensor_reason(optimizer)
            if reason is not None:
                found = replace(found, exclusions=(*found.exclusions, Exclusion(feature="tensor", reason=reason)))
        return found

    def split(self, found: ModuleMap, degrees: Sequence[int]) -> ModuleMap:
        """The map with the ways to share layers among so many devices."""
        return with_splits(self.module, self.call, self.batch, found, degrees, self.progress)

    def with_invariance(self, found: ModuleMap) -> ModuleMap:
        """The map, with microbatches ruled out if the loss of a batch is not the mean of the losses of its parts."""
        rows = batch_rows(self.batch)
        if found.excludes("microbatches"):
            return found
        if rows is None or rows < 2:
            reason = "the batch cannot be cut: its tensors do not share a first dimension of at least 2 rows"
        else:
            self.progress.say("checking that a batch may be cut into microbatches")
            with self.lean(found, alone=True):
                answer = check_microbatch_invariance(self.module, self.call, self.batch, 2)
            if answer is None:
                return found
            reason = answer
        return replace(found, exclusions=(*found.exclusions, Exclusion(feature="microbatches", reason=reason)))

    def seconds(self, found: ModuleMap) -> tuple[LayerSeconds, ...]:
        """Measured seconds of the layers, every rank computing at the same time."""
        rows = batch_rows(self.batch)
        if rows is None:
            return ()
        sizes = [rows] if found.excludes("microbatches") else measured_sizes(rows)
        dist.barrier()
        with self.lean(found):
            return time_layers(
                self.module,
                found,
                lambda size: self.batch if size == rows else slice_rows(self.batch, 0, size),
                sizes,
                self.call,
                device=self.strategy.root_device,
                progress=self.progress.update,
            )

    def update_seconds(self) -> float:
        """Measured seconds of the optimizer's step per byte of parameters, every rank computing at the same time."""
        dist.barrier()
        return sum(time_update(item, device=self.strategy.root_device) for item in self.strategy.optimizers[:1])

    def trace(self, found: ModuleMap) -> ModelSpec:
        """What the module costs; on rank 0, kept for later."""
        self.progress.say("tracing the model")
        optimizer = self.strategy.optimizers[0] if self.strategy.optimizers else None
        self.spec = trace_model(
            self.module,
            self.batch,
            call=self.call,
            module_map=found,
            optimizer=optimizer,
            precision=str(self.trainer.precision),
            device_kind=self.strategy.root_device.type,
        )
        return self.spec

    def tune(
        self, found: ModuleMap, profile: HardwareProfile, seconds: tuple[LayerSeconds, ...], update: float
    ) -> TuneResult:
        """The best plan; on rank 0."""
        spec = attach_seconds(self.trace(found), seconds, update)
        cluster, request = self.alike, self.request
        self.basis = Basis(
            spec=spec,
            profile=profile,
            cluster=cluster,
            global_batch_size=(batch_rows(self.batch) or 1) * cluster.world_size,
            memory_limit=request.memory_limit,
            search=request.search,
        )
        if request.correct_profile:
            directory, precision = machine.directory_of(request.profile_directory), str(self.trainer.precision)
            self.basis = with_corrections(self.basis, directory, precision, self.progress.say)
        self.progress.say(f"searching plans for {spec.num_layers} layers on {cluster.world_size} devices")
        return self.basis.tune()

    def fingerprint(self, found: ModuleMap) -> Fingerprint:
        """What a plan made here is made for."""
        return fingerprint_of(
            found,
            world_size=self.strategy.world_size,
            batch_rows=batch_rows(self.batch),
            precision=str(self.trainer.precision),
            versions=[(name, version(name)) for name in ("lightning-mist", "torch")],
        )

    @property
    def alike(self) -> Cluster:
        """The cluster to plan for, whose devices must be alike."""
        return alike(self.cluster)
