"""What one planning works with: the module, its batch, and ways to ask the user's step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_mist.errors import TraceError
from lightning_mist.explain import estimate_of
from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.model import (
    LayerSeconds,
    ModelSpec,
    OptimizerRule,
    attach_seconds,
    describe_optimizer,
    measured_sizes,
    time_layers,
    time_update,
    trace_model,
    with_master_weights,
)
from lightning_mist.model.cuts import compiled_exclusions
from lightning_mist.model.initialization import InitialValues, blocks_alike
from lightning_mist.model.trace import step_bytes
from lightning_mist.optimizers import is_entrywise, is_torchs
from lightning_mist.plan import (
    Exclusion,
    Feature,
    Fingerprint,
    ModuleMap,
    Plan,
    SearchSpace,
    fingerprint_of,
    from_json,
    proved_features,
    to_json,
)
from lightning_mist.plan.module_map import exclusions_of
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.strategy.planning.decision import (
    PlanRequest,
    cache_key,
    cache_path,
    cached_plan,
    remembered_limit,
    write_plan,
)
from lightning_mist.strategy.planning.division_proofs import agree, prove_here, with_splits, written_by
from lightning_mist.strategy.planning.local_machine import alike
from lightning_mist.strategy.planning.memory_budget import Budget, Room, everywhere_unless_out_of_memory
from lightning_mist.strategy.planning.plain_parallelism import (
    LARGEST_SHARE,
    STATES,
    STATES_WITH_MASTERS,
    enough,
    most_to_save,
    optimizer_exclusions,
    optimizer_rule,
    plain_plan,
    sharing_seconds,
    steps_to_come,
    with_whole_blocks,
)
from lightning_mist.strategy.planning.trial_step import CALLS, TriedStep, timed_apart, tried
from lightning_mist.strategy.profile_corrections import PlanBasis, with_corrections
from lightning_mist.strategy.ranks import Progress, everywhere, of_all_ranks, on_rank_zero
from lightning_mist.strategy.training import take_apart
from lightning_mist.strategy.user_code import BUT_PLAIN, user_exclusions
from lightning_mist.tensors import batch_rows, is_hollow, slice_rows
from lightning_mist.tuner import TuneResult
from lightning_mist.tuner.space import tensor_share
from lightning_mist.units import format_bytes

T = TypeVar("T")

SHARED_BATCHES: tuple[Feature, ...] = ("pipeline", "tensor", "context")
"""What lets ranks compute on batches that others load."""


@dataclass(slots=True, kw_only=True)
class FitPlanner:
    """The state of one planning: what to plan for, and how to call the user's step."""

    trainer: Any
    strategy: Any
    request: PlanRequest
    progress: Progress
    plain: str | None
    batch: Any
    call: TriedStep
    initial: InitialValues | None
    cluster: AnyCluster
    restrictions: Callable[[], tuple[Exclusion, ...]] = tuple
    prepare: Callable[[Any], None] | None = None
    basis: PlanBasis | None = None
    cached_at: Path | None = None
    cache_place: Path | None = None
    is_scarce: bool = False
    wished: PlanRequest | None = None
    rules: CutRules | None = None
    step_bytes: list[int | None] = field(default_factory=list)

    def lean(self, found: ModuleMap) -> AbstractContextManager[None]:
        """Inside, a module without values has some, with which it can run on real numbers; on every rank."""
        return nullcontext() if self.initial is None else self.initial.lean(found.blocks)

    @property
    def budget(self) -> Budget:
        """What plans may take of each device."""
        return Budget(cluster=self.cluster, asked=self.request.memory_limit)

    @property
    def room(self) -> Room:
        """What planning may take of each device."""
        limit = tensor_share(self.cluster) * self.budget.limit
        held = sum(p.numel() * p.element_size() for p in self.module.parameters() if not is_hollow(p))
        return Room(held=held, limit=limit, step_bytes=self._counted)

    def tried(self, work: Callable[..., T], *, tell: Callable[..., None] | None = None) -> T:
        """What some work on the user's code gives, without a trace of it; see :func:`.trial_step.tried`."""
        return tried(self.call.around(work), self.strategy.root_device, clock=self.call.clock, tell=tell)

    @property
    def may_be_plain(self) -> bool:
        """Whether plain data parallelism is trained where it is enough; else whatever is searched for is."""
        return self.request.search == SearchSpace() and not self.is_scarce

    def _saved(self, *, reduction: float = 0.0, update: float = 0.0) -> float | None:
        """See :func:`most_to_save`; None for a module that no device holds whole."""
        if self.initial is not None:
            return None
        held = list(self.module.parameters())
        return most_to_save(held, self.alike, self.request.directory, reduction=reduction, update=update)

    def plain_is_enough(self, reduction: float = 0.0) -> str | None:
        """Why nothing needs to be searched, if so, where reductions take so many seconds per byte; on rank 0."""
        if (saved := self._saved(reduction=reduction)) is None:
            return None
        return enough(saved=saved, steps=steps_to_come(self.trainer), fits=self._fits_plainly)

    def worthwhile(
        self,
        found: ModuleMap,
        profile: HardwareProfile,
        seconds: Sequence[LayerSeconds],
        update: float,
        degrees: tuple[int, ...],
    ) -> tuple[str | None, tuple[int, ...]]:
        """Why measured layers leave nothing to be searched, if so, and which degrees could save more than they cost.

        Beside plain data parallelism that fits; on rank 0.
        """
        if (saved := self._saved(update=update)) is None:
            return None, degrees
        useful = tuple(degree for degree in degrees if sharing_seconds(profile, found, seconds, degree) < saved)
        reason = enough(saved=saved, seconds=seconds, fits=self._fits_plainly)
        return reason, useful if useful == degrees or self._fits_plainly() else degrees

    def _fits_plainly(self) -> bool:
        """Whether plain data parallelism certainly fits; not where the step cannot be counted so quickly."""
        held = sum(p.numel() * p.element_size() for p in self.module.parameters())
        states = STATES_WITH_MASTERS if self.request.master_weights else STATES
        # A step that reads values back is counted on real numbers, if it is planned for.
        needed = self._counted()
        return needed is not None and states * held + needed <= LARGEST_SHARE * self.budget.limit

    def _counted(self) -> int | None:
        """What a step of the whole batch allocates, gradients included; ``None`` if that cannot be told quickly."""
        if not self.step_bytes:
            try:
                self.step_bytes.append(self.tried(lambda: step_bytes(self.module, self.call, self.batch)))
            except TraceError:
                self.step_bytes.append(None)
        return self.step_bytes[0]

    @property
    def module(self) -> Any:
        """The user's module."""
        return self.strategy.lightning_module

    def map(self) -> ModuleMap:
        """Where the module can be cut, with what hooks, callbacks, optimizers and other choices here rule out."""
        if self.plain is not None and not self.call.is_automatic:
            found = ModuleMap(step=self.call.name, blocks=(), cuts=(), parameters=())
        else:
            call, device = self.call, self.strategy.root_device
            call.batch, call.before = self.batch, None
            mapped = partial(call.mapped, self.batch, blocks=self.request.blocks, may_repeat=not call.is_automatic)
            look = partial(call.learn, mapped)
            found, told = tried(look, device, clock=call.clock)
            if self.prepare is not None and found.writes == "maybe":
                # It cannot be traced. It may use what hooks make, which are not run without need.
                call.before = partial(self.prepare, self.batch)
                try:
                    found, told = tried(look, device, clock=call.clock)
                except TraceError:
                    call.before = None
            call.know(told)
            if found.writes == "" and ("data" in call.reach.names or call.name == "forward"):
                found = replace(found, writes="maybe")  # of a loop nothing is seen but the module's call
        plain = self.plain
        reasons: list[tuple[str, tuple[Feature, ...]]] = [] if plain is None else [(plain, BUT_PLAIN)]
        try:
            take_apart(self.batch, self.strategy.root_device)
        except ValueError as error:
            reasons.insert(0, (f"batches cannot go to the ranks that would share them ({error})", SHARED_BATCHES))
        extra = list(exclusions_of(reasons))
        extra += compiled_exclusions(self.module, found.blocks)
        for _, rule in self._optimizers():
            extra += optimizer_exclusions(rule)
        if plain is None:
            masters = self.request.master_weights
            extra += user_exclusions(self.trainer, self.strategy.optimizers, master_weights=masters)
            extra += self.restrictions()
            extra += exclusions_of((reason, ("even_shards",)) for reason in self._whole_reasons())
        made = replace(found, exclusions=(*found.exclusions, *extra))
        return replace(made, even_shards=plain is None and not made.excludes("even_shards"))

    def _whole_reasons(self) -> Iterator[str]:
        """Why ranks may not update pieces of parameters, wherever these begin and end, if so."""
        parameters = list(self.module.parameters())
        storages = {p.untyped_storage()._cdata for p in parameters}
        if len(storages) < len(parameters) or not all(is_hollow(p) or p.is_contiguous() for p in parameters):
            yield "not every parameter lies in memory of its own, in one piece"
        for item in self.strategy.optimizers:
            if not is_entrywise(type(item)):
                yield f"{type(item).__name__} is not known to treat every entry by itself"
            elif not is_torchs(item):
                yield f"{type(item).__name__} steps with hooks or methods that are not torch's"

    def with_writes(self, found: ModuleMap) -> ModuleMap:
        """The map, without sharding where the step writes other values into weights on each rank; all take part."""
        if found.writes != "seen" or found.excludes("sharded_gradients"):
            return found
        look = partial(written_by, self.module, self.call, self.batch)
        sums = of_all_ranks(everywhere(lambda: None if self.initial is not None else self.tried(look)))
        if sums[0] is not None and all(mine == sums[0] for mine in sums):
            return found
        reason = "the step writes into weights what follows from the batch, so that weights of ranks would differ"
        return found.excluding(reason, "sharded_gradients")

    def split(self, found: ModuleMap, degrees: tuple[Sequence[int], Sequence[int]]) -> ModuleMap:
        """The map with the ways to share layers, and rows, among so many devices."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        found = with_splits(self.module, self.call, self.batch, found, degrees, self.progress, self.tried)
        for optimizer, rule in self._optimizers():
            found = with_whole_blocks(found, optimizer, rule, names)
        return found

    def _optimizers(self) -> list[tuple[Any, OptimizerRule]]:
        """The optimizers, and what each looks at together."""
        dtype = torch.float32 if self.request.master_weights else None
        return [(item, optimizer_rule(item, self.strategy.root_device, dtype)) for item in self.strategy.optimizers]

    def with_invariance(self, found: ModuleMap, plan: Plan) -> ModuleMap:
        """The map, without what a plan does to batches unless it is proved that parts train as the whole does.

        Every rank takes part; afterwards all have the same :attr:`rules`.
        """
        cut = "; ".join(found.excludes("microbatches"))
        alike = not cut and self.initial is None and on_rank_zero(self.room.is_crowded)
        tokens: CutRules | str = cut
        if max(plan.stages[-1].tail_chunks, *self.request.search.tail_chunks) > 1:
            tokens = cut or self._proof_of_tokens(found, plan.stages[-1].microbatch_size, alike=alike)
            found = _with_tokens(found, tokens)
        if "microbatches" in proved_features(plan, found) and not cut:
            self.progress.say("checking that a batch may be cut into microbatches")
            answer = self._proof(found, alike=alike)
            if isinstance(answer, str):
                found = found.excluding(answer, "microbatches")
            else:
                self.rules = answer.bound_to(self.module)
                if isinstance(tokens, CutRules) and tokens.site_text != answer.site_text:
                    found = _with_tokens(found, "tokens would have to count otherwise than rows do")
                if found.lap is None and answer.whole_tail:
                    found = found.excluding(answer.whole_tail, "tail_chunks")
        if isinstance(tokens, CutRules) and found.lap is not None:
            self.rules = replace(self.rules or CutRules(), tokens=tokens.bound_to(self.module))
        return found

    def _proof_of_tokens(self, found: ModuleMap, rows: int, *, alike: bool) -> CutRules | str:
        """How chunks of tokens compute behind the last layer, as they are or with the next one's first, or why not."""
        if found.tokens is None:
            return "what it is given has no place for each of several tokens of a row"
        self.progress.say("checking that what is behind the last layer may take tokens in chunks")
        reasons = []
        for lap in (0, 1):
            if not isinstance(answer := self._proof(found, lap, rows, alike=alike), str):
                return answer
            reasons.append(answer)
        return f"{reasons[0]}. With the next chunk's first token: {reasons[1]}"

    def _proof(self, found: ModuleMap, lap: int | None = None, rows: int = 2, *, alike: bool) -> CutRules | str:
        """How batches are cut, or why not, the same on every rank; ``alike`` lets blocks share parameters meanwhile."""

        def prove() -> CutRules | str:
            with blocks_alike(self.module, found.blocks) if alike else nullcontext():
                return self.tried(lambda: prove_here(self.module, found.blocks, self.call, self.batch, lap, rows))

        with self.lean(found):
            answer = everywhere_unless_out_of_memory(prove, self.strategy.root_device)
        if answer is not None:
            return agree(answer)
        if alike or self.initial is not None:
            return "devices have no room to prove that parts of a batch train as the whole does"
        self.progress.say("devices have no room for that: trying it with the parameters of one layer of each kind")
        return self._proof(found, lap, rows, alike=True)

    def seconds(self, found: ModuleMap) -> tuple[LayerSeconds, ...]:
        """Measured seconds of the layers, every rank computing at the same time; called by all at once."""
        rows = batch_rows(self.batch)
        if None in of_all_ranks(rows) or rows is None:  # asked of all in any case
            return ()
        sizes = [rows] if found.excludes("microbatches") else measured_sizes(rows)
        if not timed_apart(self.strategy.root_device):
            sizes = sorted({sizes[0], sizes[-1]})
        if self.initial is None and on_rank_zero(self.room.is_crowded):
            sizes = self.room.fitting(sizes)
        while min(of_all_ranks(len(sizes))):
            timed = everywhere_unless_out_of_memory(partial(self._timed, found, rows, sizes), self.strategy.root_device)
            if timed is not None:
                return timed
            self.progress.say(f"devices have no room to time layers on {sizes[-1]} rows")
            sizes = sizes[:-1]
        return ()

    def _timed(self, found: ModuleMap, rows: int, sizes: Sequence[int]) -> tuple[LayerSeconds, ...]:
        """Measured seconds of the layers for parts of so many rows."""
        is_apart = timed_apart(self.strategy.root_device) or self.call.before is not None

        def measure(tell: Callable[[str, float], None] | None = None) -> tuple[LayerSeconds, ...]:
            return time_layers(
                self.module,
                found,
                lambda size: self.batch if size == rows else slice_rows(self.batch, 0, size),
                sizes,
                self.call,
                device=self.strategy.root_device,
                progress=tell or self.progress.update,
                most_calls=None if is_apart else CALLS,
            )

        dist.barrier()
        with self.lean(found):
            return self.tried(measure, tell=self.progress.update) if is_apart else self.call.around(measure)()

    def update_seconds(self) -> float:
        """Measured seconds of the optimizer's step per byte of parameters, every rank computing at the same time."""
        dist.barrier()
        room, dtype = self.room.limit - self.room.held, torch.float32 if self.request.master_weights else None
        time = partial(time_update, device=self.strategy.root_device, room=room, dtype=dtype)
        return self.tried(lambda: sum(map(time, self.strategy.optimizers[:1])))

    def trace(self, found: ModuleMap) -> ModelSpec:
        """What the module costs; on rank 0."""
        self.progress.say("tracing the model")
        optimizer = self.strategy.optimizers[0] if self.strategy.optimizers else None
        kind = self.strategy.root_device.type
        spec = self.tried(
            lambda: trace_model(
                self.module,
                self.batch,
                call=self.call,
                module_map=found,
                optimizer=optimizer,
                precision=str(self.trainer.precision),
                device_kind=kind,
            )
        )
        if self.request.master_weights:
            told = None if optimizer is None else describe_optimizer(optimizer, device_kind=kind, dtype=torch.float32)
            spec = with_master_weights(spec, told)
        return spec

    def count(
        self, found: ModuleMap, profile: HardwareProfile, seconds: tuple[LayerSeconds, ...], update: float
    ) -> None:
        """Work out what predictions of plans follow from; on rank 0."""
        spec = attach_seconds(self.trace(found), seconds, update)
        cluster, request = self.alike, self.request
        basis = PlanBasis(
            spec=spec,
            profile=profile,
            cluster=cluster,
            global_batch_size=(batch_rows(self.batch) or 1) * (request.loaders or cluster.world_size),
            memory_limit=request.memory_limit,
            search=request.search,
            host_limit=request.host_limit,
            has_files=request.offload_directory is not None,
        )
        if request.correct_profile:
            basis = with_corrections(basis, request.directory, str(self.trainer.precision), self.progress.say)
        self.basis = basis

    def tune(self) -> TuneResult:
        """The best plan; on rank 0, once costs are counted."""
        assert self.basis is not None
        self.progress.say(f"searching plans for {self.basis.subject}")
        self.basis, made = self.basis.tuned(self.progress.tell if self.budget.binds else None)
        return made

    def rule_out_cuts(self, reason: str, feature: Feature = "microbatches") -> None:
        """Let no plan that is searched from now on cut a batch, or what of it is behind the last layer."""
        if self.basis is not None:  # on rank 0
            self.basis = self.basis.without(feature, reason)

    def plainest(self) -> Plan:
        """Plain data parallelism, predicted; on rank 0, once costs are counted."""
        assert self.basis is not None
        world_size, size = self.basis.cluster.world_size, self.basis.global_batch_size
        bare = plain_plan(world_size, size // world_size, self.basis.spec.num_layers)
        return replace(bare, predicted=self.basis.predict(bare))

    def simplest(self, made: TuneResult) -> Plan:
        """The best plan that was found, or plain data parallelism if that fits and is as good; on rank 0."""
        if made.plan.is_plain:
            return made.plan
        bare, basis = self.plainest(), self.basis
        assert basis is not None
        why = enough(
            predicted=(made.predicted, bare.prediction),
            fits=lambda: estimate_of(basis.spec, self.cluster, bare, self.budget.limit).verdict == "fits",
        )
        if why is None:
            return made.plan
        self.progress.tell(f"plain data parallelism: {why}")
        return bare

    def cached(self, found: ModuleMap) -> Plan | None:
        """The plan that was made for the same question before, if there is one; the same on every rank."""

        def look() -> tuple[str | None, Path, int | None]:
            path = self._cache_path(found)
            plan, warning = cached_plan(path, self.fingerprint(found))
            if warning is not None:
                self.progress.say(warning)
            return None if plan is None else to_json(plan), path, remembered_limit(path)

        text, self.cache_place, limit = on_rank_zero(look)
        if limit is not None and limit < self.budget.limit:
            self.progress.tell(f"an earlier run was out of memory: planning within {format_bytes(limit)} per device")
            self.wished = self.wished or self.request
            self.request = replace(self.request, memory_limit=limit)
            return self.cached(found)
        if text is not None:
            self.progress.say("the plan was made by an earlier run of the same module on this machine")
        return None if text is None else from_json(text)

    def cache(self, found: ModuleMap, plan: Plan) -> None:
        """Keep a plan that was made here."""
        if self.strategy.is_global_zero:
            path = self._cache_path(found)
            try:
                write_plan(plan, path)
                self.cached_at = path
            except OSError as error:
                self.progress.say(f"the plan is not kept for later runs: {error}")

    def _cache_path(self, found: ModuleMap) -> Path:
        request, trainer = self.request, self.trainer
        others = (
            self.cluster,
            request.memory_limit,
            request.host_memory_limit,
            request.offload_directory,
            request.search,
            request.blocks,
            request.correct_profile,
            trainer.precision,
            request.master_weights,
            trainer.gradient_clip_val,
            trainer.accumulate_grad_batches,
            found.exclusions,
            found.blocks,
        )
        return cache_path(request.directory, cache_key(self.module, self.batch, self.strategy.optimizers, others))

    def fingerprint(self, found: ModuleMap) -> Fingerprint:
        """What a plan made here is made for."""
        return fingerprint_of(
            found,
            world_size=self.strategy.world_size,
            batch_rows=batch_rows(self.batch),
            precision=str(self.trainer.precision),
            master_weights=self.request.master_weights,
            versions=[(name, version(name)) for name in ("lightning-mist", "torch")],
        )

    @property
    def alike(self) -> Cluster:
        """The cluster to plan for, whose devices must be alike."""
        return alike(self.cluster)


def _with_tokens(found: ModuleMap, tokens: CutRules | str) -> ModuleMap:
    """The map with how many tokens chunks share behind the last layer, or why these take none in chunks."""
    if isinstance(tokens, str):
        return replace(found.excluding(tokens, "tail_tokens"), lap=None)
    return replace(found, lap=tokens.lap)
