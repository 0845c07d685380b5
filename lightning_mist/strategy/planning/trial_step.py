"""The user's step as planning tries it: what it does beside its module is noticed, undone, and says what plans may be.

Where this process can be copied, code is tried in a copy: whatever it changes there (counters on classes, globals,
iterators, metrics, files, what it prints) is gone with the copy. On a CUDA device nothing can be computed in a copy;
there it runs here, isolated as far as a process can be.

A step that talks to other processes talks to nobody while it is tried: ranks try it at other times and more or less
often than each other, some not at all.

Every trial has an end: what does not keep within :class:`~lightning_mist.model.child_process.TrialBudget` is given up.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_mist.attributes import SharedPatch, replaced
from lightning_mist.errors import MistError, TraceError
from lightning_mist.model import derive_contexts, derive_splits, map_module, run_apart
from lightning_mist.model.child_process import Endless, RunClock, can_fork
from lightning_mist.model.user_code import Generators, Reach, Surroundings, is_users
from lightning_mist.plan import Feature, ModuleMap, Plan
from lightning_mist.plan.module_map import Reasons, exclusions_of
from lightning_mist.recomputation import neutral_checkpointing, watched_checkpoints
from lightning_mist.runtime.stage import Talk, seen_backward, watched_processes
from lightning_mist.strategy.planning.division_proofs import degrees_of, with_ways
from lightning_mist.strategy.ranks import any_reason, everywhere, of_all_ranks
from lightning_mist.strategy.training import MetricCall, MetricRecorder, named_metrics, recorded_logs, standing_in
from lightning_mist.strategy.user_code import BUT_PLAIN, Survey, changed, unlike
from lightning_mist.tensors import batch_rows, is_hollow, slice_rows

T = TypeVar("T")

CALLS = 8
"""How often the user's step may be called beside training where that leaves traces."""


def tried(
    work: Callable[..., T],
    device: torch.device,
    *,
    clock: RunClock | None = None,
    tell: Callable[..., None] | None = None,
) -> T:
    """What some work of ours on the user's code gives, tried in a copy of this process if that is possible.

    Args:
        work: What to do; its result must be picklable.
        clock: Told when the user's step runs, if the work knows.
        tell: Told what the work says with its argument ``tell``; only where it runs in a copy.

    Raises:
        TraceError: If the work does not end, or fails with anything but an error of this package, its cause then.
    """
    clock = clock or RunClock()
    try:
        if leaves_no_trace(device):
            return run_apart(work, method="fork", muted=True, tell=tell, clock=clock)
        with clock.ending():
            return work()
    except MistError:
        raise
    except Endless as error:
        raise TraceError(str(error)) from error
    except Exception as error:
        text = f"trying it before training failed: {type(error).__name__}: {error}"
        raise TraceError(vars(error).get("explained_by_trial", text)) from error


def leaves_no_trace(device: torch.device) -> bool:
    """Whether trials run in a copy of this process."""
    return device.type == "cpu" and can_fork(threads=True)


def _in_one_place(module: nn.Module) -> str | None:
    """Two parameters of which one has elements of the other's, if there are such."""
    together: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if not is_hollow(parameter):
            together.setdefault((parameter.untyped_storage()._cdata, parameter.dtype), []).append((name, parameter))
    for found in (found for found in together.values() if len(found) > 1):
        taken = torch.zeros(found[0][1].untyped_storage().nbytes() // found[0][1].element_size(), dtype=torch.bool)
        for index, (name, parameter) in enumerate(found):
            own = taken.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
            if own.any():
                return f"{name} and {' or '.join(other for other, _ in found[:index])}"
            own.fill_(value=True)
    return None


def timed_apart(device: torch.device) -> bool:
    """Whether what is timed in a copy takes as long as here: the threads of parallel loops do not come along."""
    return leaves_no_trace(device) and torch.get_num_threads() == 1


_SHARED: tuple[Feature, ...] = ("pipeline", "tensor")
"""What lets a rank run the step for the batches of others."""

_ONCE: tuple[Feature, ...] = (*_SHARED, "microbatches")
"""What lets a rank run the step another number of times than once for every batch of its own."""

_BEHIND: tuple[Feature, ...] = ("sharded_parameters", "offloaded_parameters", "offloaded_activations")
"""What is not on the device any more when a layer's forward is over, where a backward inside the step asks for it."""

_OWN_BACKWARD = "the step runs a backward of its own (torch.autograd.grad or Tensor.backward)"

_LOGGED = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID")


@dataclass(slots=True, kw_only=True)
class _Told:
    """What watched runs of a step told, in words; of what they changed, also whether layers may have done it."""

    changed: tuple[tuple[str, bool], ...] = ()
    recomputed: str = ""
    talk: str = ""
    asked: str = ""
    is_steady: bool = False
    differentiates: bool = False
    metrics: str = ""


class TriedStep:
    """The user's step on a batch, run in trials.

    Args:
        records_metrics: Whether calls of the module's metrics are to be recorded in place of made, as far as the step
            lets that be.

    Attributes:
        is_automatic: Whether a run of the step is all that a batch's gradients need.
        calls: The calls of metrics in the last run, inside :meth:`keeping_calls`.
        batch: What is planned for, if that is known.
        before: Does what comes before the step, in copies of this process.
    """

    batch: Any = None
    before: Callable[[], None] | None = None

    def __init__(
        self,
        trainer: Any,
        module: Any,
        call: Callable[[Any], Any],
        *,
        name: str = "training_step",
        records_metrics: bool = False,
    ) -> None:
        self.records_metrics, self.calls, self.clock = records_metrics, list[MetricCall](), RunClock()
        self._keeps_calls = False
        # Ranks that share layers are threads here, of which each may be in the middle of a run.
        self._standing_in = SharedPatch(lambda: standing_in(named_metrics(module).values()))
        self._module, self._call, self.name = module, call, name
        self.is_automatic = bool(getattr(module, "automatic_optimization", True))
        self.reach = Reach(module, getattr(module, name), roots_of(trainer))
        self._survey = Survey(self.reach, without=named_metrics(module).values() if records_metrics else ())
        self._surroundings: Surroundings | None = None
        self._told, self._is_known = _Told(), False

    @property
    def talk(self) -> str:
        """What the step said to other processes; empty if nothing."""
        return self._told.talk

    def __call__(self, batch: Any) -> Any:
        """Run the step."""
        around, first = self._surroundings, next(self._module.parameters(), None)
        with self.clock.running(has_values=not isinstance(first, FakeTensor)):
            if around is None:
                return self._run(batch)
            with around.run(), seen_backward(self._saw_backward):
                return self._run(batch)

    def _run(self, batch: Any) -> Any:
        if not self.records_metrics:
            return self._call(batch)
        self.calls = []
        keep = self.calls.append if self._keeps_calls else lambda call: None
        has_loss = self.name == "training_step"
        recorder = MetricRecorder(named_metrics(self._module), keep, has_loss=has_loss)
        with self._standing_in:
            try:
                return recorder.run(self._call, batch)
            finally:
                self._told.metrics = self._told.metrics or recorder.refusal or ""

    def keeping_calls(self) -> AbstractContextManager[None]:
        """Inside, calls of metrics are kept until the next run, with what they are given."""
        return replaced(self, _keeps_calls=True, calls=[])

    def mapped(self, batch: Any, **more: Any) -> ModuleMap:
        """Where the module can be cut in this step; see :func:`map_module` for the rest."""

        def given() -> list[Any]:
            return [call.value for call in self.calls]  # what metrics were given in the last run

        rows = batch_rows(batch)
        smaller = slice_rows(batch, 0, rows - 1) if rows is not None and rows > 1 else None
        return map_module(self._module, self, batch, second_batch=smaller, step=self.name, kept=given, **more)

    def learn(self, work: Callable[[], ModuleMap]) -> tuple[ModuleMap, _Told]:
        """Do work that runs the step, and tell what the runs did; nothing of it stays here."""
        with self.keeping_calls():
            answer = self._learn(work)
        if not self._told.metrics or not self.records_metrics:
            return answer
        # What is done to metrics cannot be recorded: they run with the step.
        self.records_metrics = False
        return self._learn(work)

    def _learn(self, work: Callable[[], ModuleMap]) -> tuple[ModuleMap, _Told]:
        with self._held() as around, neutral_checkpointing(), watched_checkpoints(self._in_checkpoint):
            found = work()
            changes, is_steady = around.settle(), around.is_steady
        blocks = [self._module.get_submodule(name) for name in found.blocks] if changes else []
        reaches = [Reach(block, block.forward, {}) for block in {type(block): block for block in blocks}.values()]
        told = tuple(
            (f"{name} ({space.label})", not blocks or any(reach.has(name, space) for reach in reaches))
            for name, space in changes
        )
        return found, replace(self._told, changed=told, is_steady=is_steady)

    @contextmanager
    def _in_checkpoint(self) -> Iterator[None]:
        """Around a function that the step itself would have recomputed in backward."""

        def look() -> dict[str, Any]:
            buffers = {f"buffer {name}": buffer._version for name, buffer in self._module.named_buffers()}
            return {**self._survey.look(), **buffers}

        before, generators = look(), Generators()
        yield
        names = [*changed(before, look()), *generators.outside_torch(Generators())] if torch.is_grad_enabled() else []
        self._told.recomputed = self._told.recomputed or "".join(names[:1])

    def know(self, told: _Told) -> None:
        """Remember what runs told, perhaps in a copy of this process."""
        self._told, self._is_known = told, True
        self.records_metrics = self.records_metrics and not told.metrics

    def around(self, work: Callable[..., T]) -> Callable[..., T]:
        """Work that runs the step, with each run beginning alike and nothing of it staying here."""

        def held(*args: Any, **kwargs: Any) -> T:
            with self._held() as around:
                around.settle()
                try:
                    return work(*args, **kwargs)
                except MistError:
                    raise
                except Exception as error:
                    vars(error)["explained_by_trial"] = self._explained(error)
                    raise

        return held

    def _explained(self, error: Exception) -> str:
        """What a trial of the step that failed says: whose error it is."""
        text = f"trying it before training failed: {type(error).__name__}: {error}. "
        if self._told.differentiates:
            return f"{_OWN_BACKWARD}, which does not reach through layers that run apart: use a plan with one stage"
        if any(map(is_hollow, self._module.parameters())):
            return text
        try:
            self(self.batch)
        except Exception:
            return (
                f"{text}It is tried before hooks of the fit and the epoch run: let __init__ make what the step needs. "
                "If it fails with them too, strategy='ddp' shows the error where it is made"
            )
        return f"{text}The step itself runs on the first batch; layers or rows of it run apart do not"

    @contextmanager
    def _held(self) -> Iterator[Surroundings]:
        if self.before is not None:
            self.clock.begin()
            with watched_processes(lambda *_: True), suppress(Exception):
                self.before()
        around = Surroundings(self.reach, is_steady=self._told.is_steady)
        try:
            with replaced(self, _surroundings=around), watched_processes(self._noticed):
                yield around
        finally:
            around.release()

    def rule_out(self, found: ModuleMap) -> ModuleMap:
        """The map, with what the step's runs so far, its code and other ranks say against plans; on all at once."""
        return replace(found, exclusions=(*found.exclusions, *exclusions_of(self._reasons())))

    def _reasons(self) -> Reasons:
        for what, is_inner in self._told.changed:
            yield (
                f"the step changes {what} as often as it runs, which under DDP is once for every batch of a rank's own",
                (*_ONCE, "checkpointing") if is_inner else _ONCE,
            )
        if what := self._told.recomputed:
            why = "in what it recomputes itself (torch.utils.checkpoint), so in backward once more"
            yield f"the step changes {what} {why}, which only plain data parallelism does", BUT_PLAIN
        for name, child in self._module.named_modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
                yield f"{name} (sparse=True) has sparse gradients, which only plain data parallelism reduces", BUT_PLAIN
        if several := _in_one_place(self._module):
            yield f"parameters share memory ({several}), which only plain data parallelism leaves so", BUT_PLAIN
        if self._told.differentiates:
            yield _OWN_BACKWARD, _BEHIND
        if refusal := any_reason(self._told.metrics):
            self.records_metrics = False
            yield refusal, (*_ONCE, "checkpointing") if "inside a layer" in refusal else _ONCE
        if talk := any_reason(self.talk):
            self._told.talk = self.talk or talk
            yield f"the step talks to other processes itself ({talk})", (*_ONCE, "checkpointing")
        if self._told.asked:
            yield f"the step asks which process it runs in ({self._told.asked}); use self.global_rank", _SHARED
        yield from self._reads()
        for name in unlike(of_all_ranks(self._survey.details())):
            yield f"the step reads {name}, which is another on every rank", _SHARED

    def _reads(self) -> Reasons:
        """What its code reads that is another on every rank."""
        names = self.reach.names
        variables = [name for name in _RANK_VARIABLES if name in names]
        if variables and names & {"environ", "getenv"}:
            yield f"the step reads the environment variable {variables[0]}; use self.global_rank", _SHARED
        if "trainer" in names:
            for name in names.intersection(_LOGGED):
                yield f"the step reads trainer.{name}, which is another on every rank", _ONCE

    def only_own(self, told: "_Told") -> list[str]:
        """Why this rank may run the step for batches of its own only, by what runs here told; one rank asks."""
        found = [told.metrics] if told.metrics else []
        found += [f"the step changes {what} as often as it runs" for what, _ in told.changed]
        found += [f"the step talks to other processes itself ({told.talk})"] if told.talk else []
        found += [f"the step asks which process it runs in ({told.asked})"] if told.asked else []
        return [*found, *(reason for reason, _ in self._reads())]

    def _saw_backward(self) -> None:
        self._told.differentiates = True

    def _noticed(self, kind: Talk, what: str) -> bool:
        if kind == "rank":
            self._told.asked = self._told.asked or what
            return False
        is_new, self._told.talk = not self.talk, self.talk or what
        if self._is_known and is_new:
            raise TraceError(f"the step talks to other processes itself ({what}), which it did not when it was traced")
        return True


def roots_of(trainer: Any) -> Mapping[str, tuple[dict[str, Any], frozenset[str]]]:
    """What a step gets at through its trainer, by what it is, and the names of which its code must have one."""
    roots = {"the trainer": (vars(trainer), frozenset(("trainer", "_trainer")))}
    for callback in trainer.callbacks:
        if is_users(type(callback)):
            roots[f"callback {type(callback).__name__}"] = (vars(callback), frozenset(("callbacks",)))
    if trainer.datamodule is not None and is_users(type(trainer.datamodule)):
        roots["the data module"] = (vars(trainer.datamodule), frozenset(("datamodule",)))
    return roots


# Steps that are only evaluated ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """Where a step can be cut, and why ranks may run it for batches of their own only; or why that cannot be told."""

    module_map: ModuleMap | None = None
    only_own: tuple[str, ...] = ()
    failure: str = ""

    @property
    def form(self) -> Any:
        """What is equal where ranks can evaluate together."""
        found = self.module_map
        if found is None:
            return None
        uses = tuple((use.name, use.regions) for use in found.parameters)
        return found.blocks, uses, tuple(tuple(live.key for live in cut) for cut in found.cuts)


def look_at_step(
    trainer: Any, module: Any, name: str, call: Callable[[Any], Any], batch: Any, device: torch.device
) -> EvaluatedStep:
    """Try a step on a batch, without a trace of it; parameters need no values."""
    step = TriedStep(trainer, module, call, name=name, records_metrics=True)

    def look() -> EvaluatedStep:
        found, told = step.learn(partial(step.mapped, batch))
        return EvaluatedStep(module_map=found, only_own=tuple(step.only_own(told)))

    try:
        with recorded_logs(module), torch.compiler.set_stance("force_eager"):
            return tried(look, device, clock=step.clock)
    except MistError as error:
        return EvaluatedStep(failure=str(error))


def is_map_of(module_map: ModuleMap, module: nn.Module) -> bool:
    """Whether a map that a fit made of a module's step is one of this module, by its parameters in their order."""
    shapes = [(use.name, tuple(use.shape)) for use in module_map.parameters]
    return bool(shapes) and shapes == [(name, tuple(item.shape)) for name, item in module.named_parameters()]


def splits_of_evaluated(
    plan: Plan,
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    found: ModuleMap,
    source: int,
    device: torch.device,
) -> ModuleMap:
    """The map of an evaluated step with a plan's ways to share layers; on all ranks at once, ``source`` has a batch."""
    tensor, context = degrees_of(plan)
    if not (tensor and not found.excludes("tensor")) and not context:
        return found

    def derive() -> ModuleMap:
        metrics = named_metrics(module)

        def recorded(part: Any) -> Any:
            return MetricRecorder(metrics, lambda _: None, has_loss=False).run(call, part)

        def look() -> ModuleMap:
            stands_in = standing_in(metrics.values())
            with torch.inference_mode(mode=False), torch.enable_grad(), recorded_logs(module), stands_in:
                made = derive_splits(module, recorded, batch, found, tensor)
                return derive_contexts(module, recorded, batch, made, context)

        return tried(look, device)

    made = of_all_ranks(everywhere(lambda: derive() if dist.get_rank() == source else None))[source]
    assert made is not None
    return with_ways(found, made)
