"""One stage of an unmodified module.

Every stage runs the user's whole step. Parameters of other stages are replaced by *fakes*: tensors of torch's fake
mode, which have a shape but no values. Whatever depends on them is a fake too, so the step runs at no cost up to the
stage: blocks before it are answered with fakes of what they would return. On entry to the stage's first block the fakes
that are still needed turn into the tensors that were received, wherever they are referred to. On entry to the first
block of the next stage the step is left by an exception, and the values that are still needed there are handed over.
Everything that does not depend on parameters (masks, positions, targets) is computed by every stage for itself.

A value that was not carried stays a fake, and a fake among the results is an error: a wrong cut is not silent.
"""

import functools
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from lightning_mist.attributes import replaced, set_on_class
from lightning_mist.errors import TraceError
from lightning_mist.plan import Checkpointing, ModuleMap, Plan
from lightning_mist.plan.calls import (
    block_value,
    describe_value,
    intercepted,
    is_block_value,
    occurrence,
    results,
    select,
    without_caches,
)
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.plan.module_map import LiveTensor
from lightning_mist.recomputation import neutral_checkpointing, users_checkpoints
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.gradients import WeightGradients
from lightning_mist.runtime.process_state import get_random_state, inside_block, set_random_state
from lightning_mist.runtime.stage.skipped_blocks import FakeParameters, SkippedBlocks
from lightning_mist.runtime.stage.stage_split import StageSplit, TransportGroup, checkpoint_block, repeating_in
from lightning_mist.runtime.stage.unit_runner import UnitRunner
from lightning_mist.without_values import INDEXING, become, fake_mode, is_known_mask, without_warnings

# One run of the user's step on a stage: what it takes and gives, where it is, and which values cross a cut.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A tensor that a stage will receive; its length is the whole one's along the sequence, 1 if it has none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage's forward gave.

    Attributes:
        tensors: The tensors to send, in the order of the map's cut, attached to the graph; empty on the last stage.
        lengths: For each of them the size of the whole tensor along the dimension of the sequence; 1 if it has none.
        value: What the user's step returned, on the last stage.
    """

    tensors: tuple[Tensor, ...]
    value: Any
    lengths: tuple[int, ...] = ()


class StepExit(BaseException):
    """Leaves the user's step; passes ``except Exception``."""


class StepRun:
    """One run of the step.

    Args:
        received: The tensors received for the first cut; None for a run that only asks what they will be.

    Attributes:
        is_quiet: Whether nothing that is wanted can be made now.
        behind: Contexts of what follows the last block.
        error: What went wrong, to be raised once the step is left.
    """

    def __init__(
        self, wanted: frozenset[Hashable], received: Sequence[Tensor] | None, random_state: Tensor | None
    ) -> None:
        self.wanted, self.received, self.random_state = wanted, received, random_state
        self.counts: dict[Hashable, int] = {}
        self.objects: dict[Hashable, Tensor] = {}
        self.region = -1
        self.inside: int | None = None
        self.has_grad = torch.is_grad_enabled()
        self.is_quiet = False
        self.error: TraceError | None = None
        self.behind = ExitStack()

    def fail(self, message: str) -> StepExit:
        """An exception that user code does not swallow; the error is raised once the step is left."""
        self.error = TraceError(message)
        return StepExit()


class Watcher(TorchFunctionMode):
    """Finds wanted values among the results of torch functions, and indexes fakes by known masks."""

    def __init__(self, run: StepRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, kwargs = self._run, kwargs or {}
        if run.is_quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if name in INDEXING and isinstance(args[0], FakeTensor):
            func, args = select(name, func, args, is_known_mask)
        output = func(*args, **kwargs)
        made = [leaf for leaf in results(name, args, output) if isinstance(leaf, Tensor)]
        if made:
            base = occurrence(run.counts, "glue" if run.inside is None else "inner", run.region, name)
            for leaf, tensor in enumerate(made):
                key = (*base, leaf)
                if key in run.wanted:
                    run.objects[key] = tensor
        return output


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        return gradients[0]


def enter_graph(tensor: Tensor) -> Tensor:
    """A received leaf as an inner node of the graph, sharing its memory.

    A step may write in place into what crosses a cut, as it may in the uncut module, but not into a leaf or its view.
    """
    tensor.requires_grad_(True)
    with torch.enable_grad():
        return _Enter.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]


class PipelineStage:
    """One stage of a module.

    Args:
        bounds: The layer range of every stage.
        checkpointing: How many of the stage's first blocks are recomputed in backward, and what of them.
        split: How the stage is split over the ranks that share its rows; its parameters must be this rank's parts while
            it is attached. None if it is not.
        tail_chunks: Into how many chunks a microbatch is cut for what runs behind the module's last layer.

    Attributes:
        parameters: The parameters that this stage computes with, or keeps for others, by canonical name.
        fake_mode: Makes the fakes of values that only stages before this one compute; None of the first stage.
        observer: Is told when a forward, and no recomputation, enters and leaves the stage's blocks, if anybody is; set
            it before the stage is attached.
        deferral: Takes the gradients of weights out of backward, if anybody does; set it before the stage is attached.
        tail: What runs behind the last layer where it takes chunks: a stage by itself, which is attached inside this
            one.
        lap: As in the map: chunks are of tokens if it is known, else of rows.
        own: Names of the parameters that no other stage has.
        receives: The values that cross into the stage.

    Raises:
        TraceError: If the map is of another module, or rules out what is asked for.
    """

    parameters: dict[str, nn.Parameter]
    foreign: dict[str, nn.Parameter]
    observer: UnitRunner | None = None
    deferral: WeightGradients | None = None

    def __init__(
        self,
        module: nn.Module,
        module_map: ModuleMap,
        bounds: tuple[tuple[int, int], ...],
        index: int,
        *,
        checkpointing: Checkpointing | None = None,
        split: StageSplit | None = None,
        tail_chunks: int = 1,
    ) -> None:
        self.module, self._map, self._bounds, self.index = module, module_map, bounds, index
        self.split, self.tail_chunks, self.lap = split, tail_chunks, module_map.lap
        self._first, self._end = bounds[index]
        self._num_stages = len(bounds)
        self._checkpointing = checkpointing or Checkpointing()
        self._checkpointed = range(self._first, self._first + self._checkpointing.layers)
        self._check()
        self.tail: PipelineStage | None = None
        if tail_chunks > 1:
            behind = (len(module_map.blocks),) * 2
            self.tail = PipelineStage(module, module_map.with_tail_apart(), (*bounds, behind), index + 1)
        # Whether a run of the step is left, or begins, between layers or behind them.
        self._is_cut = self._num_stages > 1 or self.tail is not None
        named = dict(module.named_parameters())
        owners = module_map.owners(bounds)
        self.parameters = {name: p for name, p in named.items() if index in owners[name]}
        self.own = frozenset(name for name, stages in owners.items() if stages == (index,))
        self.foreign = {name: p for name, p in named.items() if name not in self.parameters}
        self._device = next((p.device for p in named.values()), torch.device("cpu"))
        mode = fake_mode()
        self.fake_mode = mode if index > 0 else None
        self._slots = FakeParameters(module, module_map, bounds, index, frozenset(self.parameters), mode)
        self._split_slots = () if split is None else split.slots_of(module, module_map)
        modules = dict(module.named_modules())
        self._blocks = [modules[name] for name in module_map.blocks]
        self._skipped = SkippedBlocks(self._blocks, mode, module_map.leaking_blocks)
        self.receives = module_map.cuts[self._first - 1] if index > 0 else ()
        self._sends = module_map.cuts[self._end - 1] if index < self._num_stages - 1 else ()
        if self.tail is not None:
            self._sends = module_map.tail
        self._wanted = frozenset(live.key for live in (*self.receives, *self._sends))
        self._inner = frozenset(key[1] for key in self._wanted if isinstance(key, tuple) and key[0] == "inner")
        self._is_watched = not all(is_block_value(key) for key in self._wanted) or (
            index > 0 and module_map.indexes_by_mask
        )
        self._specs: dict[Hashable, tuple[InputSpec, ...]] = {}
        self._forms: dict[Hashable, list[torch.Size]] = {}
        self._is_attached = False
        self._run: StepRun | None = None

    def _check(self) -> None:
        names = tuple(name for name, _ in self.module.named_parameters())
        mapped = tuple(use.name for use in self._map.parameters)
        if names != mapped:
            different = sorted(set(names) ^ set(mapped))
            raise TraceError(
                f"the module has {len(names)} parameters and its map {len(mapped)}, of which {different[:3]} differ: "
                "the map must be of the same module"
            )
        reasons = self._map.excludes("pipeline")
        if self._num_stages > 1 and reasons:
            raise TraceError(f"{self._num_stages} stages: {reasons[0]}. Use a plan with one stage")
        reasons = self._map.excludes("checkpointing")
        if self._checkpointed and reasons:
            raise TraceError(f"checkpointed_layers = {len(self._checkpointed)}: {reasons[0]}. Use 0")
        reasons = self._map.excludes("selective_checkpointing")
        if self._checkpointing.kind == "selective" and reasons:
            raise TraceError(f"checkpointing = 'selective': {reasons[0]}. Use 'full'")
        if self.tail_chunks > 1 and (reasons := self._map.whole_tail):
            raise TraceError(f"tail_chunks = {self.tail_chunks}: {reasons[0]}. Use 1")
        if self._num_stages > 1 and self._bounds[-1][1] != len(self._map.blocks):
            raise TraceError(
                f"the stages hold {self._bounds[-1][1]} layers, the module has {len(self._map.blocks)}: they must agree"
            )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the module is this stage; afterwards it is exactly as before."""
        if self._is_attached:
            raise RuntimeError(f"stage {self.index} is attached already: leave the context first")
        with ExitStack() as stack:
            stack.enter_context(self._slots.filled())
            if self.split is not None:
                stack.enter_context(self.split.presented(self._split_slots, self.parameters))
            stack.enter_context(intercepted(self._blocks, self._wrap))
            stack.enter_context(replaced(self, _is_attached=True))
            yield

    def input_specs(self, call: Callable[[], Any], signature: Hashable) -> tuple[InputSpec, ...]:
        """What the stage will receive for a call, in the order of the map's cut; nothing on stage 0.

        The call is run up to the stage's first block unless one of the same signature was. Random generators are left
        as they were. The stage must be attached.

        Args:
            call: Runs the user's step on its batch; what it does to its batch it will do again in :meth:`forward`.
            signature: Equal for batches whose tensors have equal shapes.

        Raises:
            TraceError: If the step does not get there, or lacks a value that it had in the trace.
        """
        if self.index == 0:
            return ()
        key = (signature, torch.is_grad_enabled(), self.module.training, *self._context())
        specs = self._specs.get(key)
        if specs is None:
            run = StepRun(self._wanted, None, get_random_state(self._device))
            with self._entered(run):
                call()
            self._check_run(run)
            self._continue_random(run)
            specs = tuple(self._spec(live, run.objects[live.key]) for live in self.receives)
            self._specs[key] = specs
        return specs

    def check_form(self, output: StageOutput, signature: Hashable) -> None:
        """See that what is sent has the form that the next stage expects, which remembers it for batches of a form.

        Raises:
            TraceError: If it has another.
        """
        shapes = [tensor.shape for tensor in output.tensors]
        for live, shape, known in zip(self._sends, shapes, self._forms.setdefault(signature, shapes), strict=True):
            if shape != known:
                raise TraceError(
                    f"stage {self.index}: the {describe_value(live.key)} has shape {tuple(shape)} and had "
                    f"{tuple(known)} for a batch of the same form: sizes that follow from something else than the "
                    "batch (a step count) are unknown to other stages; cut sequences in the loader, or use a plan with "
                    "one stage"
                )

    def _spec(self, live: LiveTensor, tensor: Tensor) -> InputSpec:
        return InputSpec(
            shape=self._held_shape(live, tensor),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=live.requires_grad and torch.is_grad_enabled(),
            length=_length(live, tensor),
        )

    def forward(self, call: Callable[[], Any], received: Sequence[Tensor]) -> StageOutput:
        """Run the stage's part of the user's step. The stage must be attached.

        Random numbers that the stage's part draws continue from the generators' states at this call.

        Args:
            received: The tensors that :meth:`input_specs` announced; leaves, in which gradients will arrive.

        Raises:
            TraceError: If the step runs its blocks in another order than in the trace, ends before the stage does, or
                gives a result that depends on a parameter of another stage.
        """
        if not self._is_cut and not self._is_attached:
            return StageOutput(tensors=(), value=call())
        state = get_random_state(self._device) if self.index > 0 else None
        run = StepRun(self._wanted, received, state)
        value, is_complete = None, False
        with self._entered(run):
            value, is_complete = call(), True
        self._check_run(run)
        if self.split is not None:
            value = self.split.given(value)
        if not self._is_cut:
            return StageOutput(tensors=(), value=value)
        if self.index == self._num_stages - 1 and self.tail is None:
            if run.region != self._end - 1:
                # Whoever computes another rank's batch cannot know that this rank would have taken another way.
                raise TraceError(
                    f"the step returned after layer {run.region} without calling layer {run.region + 1} "
                    f"({self._map.blocks[run.region + 1]}): every step must call every block, on every rank"
                )
            self._check_value(value)
            return StageOutput(tensors=(), value=value)
        if is_complete:
            raise TraceError(
                f"the step returned after layer {run.region} without calling layer {self._end} "
                f"({self._map.blocks[self._end]}), where stage {self.index} ends: every step must call every block, "
                "and may not catch BaseException around them"
            )
        tensors = tuple(self._sent(run, live) for live in self._sends)
        lengths = tuple(_length(live, tensor) for live, tensor in zip(self._sends, tensors, strict=True))
        if self.split is not None:
            pairs = zip(self._sends, tensors, strict=True)
            tensors = tuple(self.split.leaving(live, tensor) for live, tensor in pairs)
        return StageOutput(tensors=tensors, lengths=lengths, value=None)

    @contextmanager
    def _entered(self, run: StepRun) -> Iterator[None]:
        """Around a run of the step, which is left where the stage ends."""
        if not self._is_attached:
            raise RuntimeError(f"stage {self.index} is not attached: run it inside attached()")
        self._run = run
        try:
            with ExitStack() as stack:
                stack.enter_context(neutral_checkpointing())
                run.behind = stack.enter_context(ExitStack())
                if self.split is not None:
                    stack.enter_context(self.split.running({}))
                if self.index > 0:
                    stack.enter_context(without_warnings())
                # The watcher must see what comes out of the deferral.
                stack.enter_context(self._deferring())
                if self._is_watched:
                    stack.enter_context(Watcher(run))
                yield
        except StepExit:
            pass
        finally:
            self._run = None

    def _check_run(self, run: StepRun) -> None:
        """Raise what is wrong with a run that was left; behind the exception that leaves it, which is no cause."""
        if run.error is not None:
            raise run.error
        if run.region < min(self._first, len(self._blocks) - 1) and self._is_cut:
            raise TraceError(
                f"the step returned after layer {run.region} without calling layer {self._first} "
                f"({self._map.blocks[self._first]}), where stage {self.index} begins: every step must call every block"
            )

    def _deferring(self) -> AbstractContextManager[None]:
        return nullcontext() if self.deferral is None else self.deferral.watching()

    def _wrap(self, position: int, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None or run.inside is not None:
                return original(*args, **kwargs)
            if self._is_cut:
                self._arrive(run, position)
            return self._run_block(run, position, original, args, kwargs)

        # Compiled code that contains blocks must not look into this, but leave blocks to it.
        return cast("Callable[..., Any]", torch.compiler.disable(forward))  # type: ignore[no-untyped-call]

    def _arrive(self, run: StepRun, position: int) -> None:
        """Check the order of blocks, leave the step at the stage's end, and take in what was received."""
        if position != run.region + 1:
            raise run.fail(
                f"layer {position} ({self._map.blocks[position]}) was called after layer {run.region}: blocks must run "
                "in the order of the trace, each once"
            )
        if position == self._end:
            raise StepExit
        run.region = position
        if position == self._first and self.index > 0:
            if run.received is None:
                for live in self.receives:
                    self._found(run, live)
                raise StepExit
            self._receive(run, run.received)

    def _run_block(
        self, run: StepRun, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.is_grad_enabled() or self._is_cut:
            args, kwargs = without_caches(args, kwargs)
        is_local = position >= self._first or self._num_stages == 1
        if is_local and self.split is not None:
            args, kwargs = self.split.enter_block(position, args, kwargs)
        observer = self.observer if is_local else None
        if observer is not None:
            observer.before_block(position)
        run.inside, run.is_quiet = position, is_local and position not in self._inner
        try:
            with inside_block():
                if not is_local:
                    context = (self._blocks[position].training, *self._context())
                    output = self._skipped.answer(position, original, args, kwargs, context)
                elif position in self._checkpointed and torch.is_grad_enabled():
                    output = checkpoint_block(
                        original, args, kwargs, self.split, kind=self._checkpointing.kind, within=self._deferring
                    )
                else:
                    output = original(*args, **kwargs)
        finally:
            run.inside, run.is_quiet = None, False
        if observer is not None:
            observer.after_block(position)
        self._hand_on(run, position, output)
        return output

    def _hand_on(self, run: StepRun, position: int, output: Any) -> None:
        """Note what is wanted of a block's output; behind the last one leave the step, or take in what was received."""
        for leaf, value in enumerate(tree_flatten(output)[0] if self._wanted else ()):
            if block_value(position, leaf) in self._wanted and isinstance(value, Tensor):
                run.objects[block_value(position, leaf)] = value
        if position < len(self._blocks) - 1:
            return
        # What users checkpoint there is recomputed.
        run.behind.enter_context(users_checkpoints(repeating_in(self.split, self._deferring)))
        if self.tail is not None:
            raise StepExit
        if position < self._first:
            self._receive(run, run.received or ())

    def _context(self) -> tuple[Hashable, ...]:
        kind = self._device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _found(self, run: StepRun, live: LiveTensor) -> Tensor:
        tensor = run.objects.get(live.key)
        if tensor is None:
            raise run.fail(
                f"stage {self.index}: the {describe_value(live.key)} was not computed in this step, but it was in the "
                "trace: every step must take the same path through the model's code"
            )
        return tensor

    def _receive(self, run: StepRun, received: Sequence[Tensor]) -> None:
        """Turn the fakes of what crosses the cut into what was received."""
        if len(received) != len(self.receives):
            raise run.fail(f"stage {self.index} was given {len(received)} tensors: {len(self.receives)} cross its cut")
        for live, tensor in zip(self.receives, received, strict=True):
            fake = self._found(run, live)
            if self._held_shape(live, fake) != tuple(tensor.shape) or fake.dtype != tensor.dtype:
                raise run.fail(
                    f"stage {self.index} received the {describe_value(live.key)} as {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}, but its own batch gives {fake.dtype} of shape {tuple(fake.shape)}: the "
                    "stages must run the same batch"
                )
            entered = enter_graph(tensor) if live.requires_grad and run.has_grad else tensor.detach()
            if self.split is not None:
                entered = self.split.arrived(live, entered, tuple(fake.shape))
            become(fake, entered)
        self._continue_random(run)

    def _held_shape(self, live: LiveTensor, tensor: Tensor) -> tuple[int, ...]:
        """The shape in which this rank holds a tensor that crosses a boundary."""
        shape = tuple(tensor.shape)
        return shape if self.split is None else self.split.held_shape(live, shape)

    def _continue_random(self, run: StepRun) -> None:
        """Forget what the step drew before this stage: blocks of other stages drew nothing here."""
        if run.random_state is not None:
            set_random_state(run.random_state, self._device)

    def _sent(self, run: StepRun, live: LiveTensor) -> Tensor:
        tensor = run.objects.get(live.key)
        if tensor is None or isinstance(tensor, FakeTensor):
            what = "was not computed in this step" if tensor is None else "depends on a value that was not carried"
            raise TraceError(
                f"stage {self.index}: the {describe_value(live.key)} {what}: every step must take the same path "
                "through the model's code as the trace"
            )
        if tensor.requires_grad and not live.requires_grad:
            raise TraceError(
                f"stage {self.index}: the {describe_value(live.key)} requires a gradient now and did not in the trace: "
                "parameters may not be unfrozen after planning; plan again with them unfrozen"
            )
        return tensor

    def _check_value(self, value: Any) -> None:
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, FakeTensor):
                raise TraceError(
                    f"stage {self.index}: what the step returned (shape {tuple(leaf.shape)}) depends on a parameter "
                    "of another stage through a value that was not carried: this step took another path than the trace"
                )


def _length(live: LiveTensor, tensor: Tensor) -> int:
    return 1 if live.sequence_dim is None else tensor.shape[live.sequence_dim]


# The stages that one rank runs, over one copy of the module: one, or its chunks under an interleaved schedule.


class RankStages:
    """All stages of one rank.

    Several stages of a rank share one module, so only one of them can be attached at a time. A single stage stays
    attached for a whole batch; of several, each is attached for as long as it computes.

    Attributes:
        parameters: Every parameter that any of them computes with, or keeps for others, by canonical name; one that
            several use is one entry.
    """

    parameters: dict[str, nn.Parameter]
    foreign: dict[str, nn.Parameter]

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = {stage.index: stage for stage in stages}
        every = {**stages[0].parameters, **stages[0].foreign}
        held = {name for stage in stages for name in stage.parameters}
        self.parameters = {name: parameter for name, parameter in every.items() if name in held}
        self.foreign = {name: parameter for name, parameter in every.items() if name not in held}

    def __iter__(self) -> Iterator[PipelineStage]:
        """The stages, ascending."""
        return iter(self._stages.values())

    def __getitem__(self, index: int) -> PipelineStage:
        """One stage by its index in the plan."""
        return self._stages[index]

    @property
    def every(self) -> Mapping[str, nn.Parameter]:
        """All parameters of the module by canonical name."""
        return {**self.foreign, **self.parameters}

    def attached(self) -> AbstractContextManager[None]:
        """Inside, a batch runs: a single stage is attached all the while, several only where they compute."""
        return nullcontext() if len(self._stages) > 1 else next(iter(self)).attached()

    @contextmanager
    def at(self, index: int) -> Iterator[PipelineStage]:
        """Around one computation of a stage, inside :meth:`attached`: the module is this stage."""
        stage = self._stages[index]
        with nullcontext() if len(self._stages) == 1 else stage.attached():
            yield stage

    def free_foreign(self) -> None:
        """Free the storage of the parameters that other ranks' stages hold; they keep their shape.

        Where there is such a value they are not a number, so that whoever computes with them all the same sees it.
        """
        for parameter in self.foreign.values():
            fill = math.nan if parameter.is_floating_point() or parameter.is_complex() else 0
            nothing = torch.full((), fill, dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)
            parameter.grad = None


def make_stages(
    module: nn.Module, module_map: ModuleMap, plan: Plan, rank: int, transport: Transport
) -> tuple[PipelineStage, ...]:
    """The stages that ``rank`` runs under ``plan``, ascending."""
    group = plan.stage_of(rank)
    mesh, split = plan.stages[group].mesh, None
    if mesh.num_row_peers > 1:
        is_context = mesh.context_parallel_degree > 1
        found = (
            module_map.context(mesh.context_parallel_degree)
            if is_context
            else module_map.split(mesh.tensor_parallel_degree)
        )
        peers = make_mesh(plan, rank, module_map).row_peers
        split = StageSplit(
            found, TransportGroup(transport, peers, adds_later=is_context), sequence_parallel=mesh.shares_sequence
        )
    return tuple(
        PipelineStage(
            module,
            module_map,
            plan.bounds,
            index,
            checkpointing=plan.stages[index].checkpointing,
            split=split,
            tail_chunks=plan.stages[index].tail_chunks,
        )
        for index in plan.chunks(group)
    )


@contextmanager
def no_caches(module: nn.Module, module_map: ModuleMap) -> Iterator[None]:
    """Inside, the blocks of a module get no empty key-value caches while gradients are wanted.

    Models of transformers make such caches by default, and each block then keeps a copy of its keys and values until
    the step has ended. Parts of a cut module never get any; this is for one that runs as a whole. It is their classes
    that do so: modules, and what is copied or saved of them, are as the user made them.
    """
    blocks = [module.get_submodule(name) for name in module_map.blocks if "transformers.cache_utils" in sys.modules]
    numbers = {id(block) for block in blocks}

    def dropping(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def drop(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(block) in numbers and torch.is_grad_enabled():
                args, kwargs = without_caches(args, kwargs)
            return call(block, *args, **kwargs)

        return drop

    with ExitStack() as stack:
        for cls in {type(block) for block in blocks}:
            stack.enter_context(set_on_class(cls, "__call__", dropping(cls.__call__)))
        yield
