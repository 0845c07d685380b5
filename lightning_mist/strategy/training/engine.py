"""One Lightning batch through a plan: exchange, run the schedule, bring results home, hand over the gradients.

Lightning calls ``training_step``, then may clear gradients, then calls ``backward`` on the loss. The whole schedule
runs inside ``training_step``; its gradients are put aside and a loss is returned whose backward installs them,
multiplied by whatever gradient arrives there: clearing, accumulation, scaling and hooks mean what they always do.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.devices import Homeward, ops_of
from lightning_mist.errors import TraceError
from lightning_mist.model.initialization import InitialValues, empty_out
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import message_pairs, names_with_values, process_groups, talking_groups
from lightning_mist.runtime.communication import DistributedTransport, Microbatch, Transport, complete
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.executor import Executor
from lightning_mist.runtime.host_memory import HostPlace
from lightning_mist.runtime.parameters import (
    AbsentGradient,
    BufferSync,
    ParameterGatherer,
    at_work,
    clip_by_norm,
    clip_by_value,
    computing,
    given_back,
    global_grad_norm,
    held_at,
    make_absent,
    make_present,
    parts_of,
    works,
)
from lightning_mist.runtime.process_state import get_random_state, set_random_state
from lightning_mist.runtime.stage import make_stages
from lightning_mist.schedule import check, lower
from lightning_mist.strategy.empty_parameters import refuse_state_dict
from lightning_mist.strategy.training.batch_exchange import BatchExchange, digest_of, of_loader
from lightning_mist.strategy.training.log_records import LogRecorder, Record, recorded_logs
from lightning_mist.strategy.training.microbatch_step import (
    PartSteps,
    Piece,
    combine,
    pieces_by_owner,
    results_in,
)
from lightning_mist.strategy.training.step_guard import StepCall, StepGuard
from lightning_mist.strategy.training.whole_model import OwnedOptimizer
from lightning_mist.tensors import gradients_aside, is_hollow


class _InstallGradients(torch.autograd.Function):
    """A loss whose backward hands over the gradients that the schedule has computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, engine: "Engine", scale: float | Tensor) -> Tensor:
        ctx.engine, ctx.scale = engine, scale
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        (gradient,) = gradients
        ctx.engine.install(gradient / ctx.scale)
        return None, torch.zeros_like(gradient), None, None


class Engine:
    """This rank's part of a running plan; module, plan and map are the same on every rank."""

    guard: StepGuard | None = None
    records_metrics = False

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        module_map: ModuleMap,
        transport: Transport,
        *,
        device: torch.device,
        rules: CutRules | None = None,
        host: HostPlace | None = None,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        rank = transport.rank
        self.module, self.plan, self.rank, self.device = module, plan, rank, device
        self.module_map, self.transport = module_map, transport
        schedule = lower(plan, tied=any(len(stages) > 1 for stages in module_map.owners(plan.bounds).values()))
        check(schedule, plan.num_microbatches)
        stages, actions = make_stages(module, module_map, plan, rank, transport), schedule[plan.stage_of(rank)]
        self.executor = Executor(plan, rank, stages, module_map, transport, actions, host=host, masters=masters)
        self.stages = self.executor.stages
        self.exchange = BatchExchange(plan, rank, transport, device)
        self.gatherer = ParameterGatherer(
            plan, rank, self.stages.every, module_map, transport, self.executor.even.shards
        )
        self.gatherer.home_values = self.executor.home_values
        self.buffers = BufferSync(module, transport)
        # What a CPU computes is at home.
        self._homeward = None if device.type == "cpu" else Homeward(ops_of(device))
        self._logs = LogRecorder()
        self._part_steps = PartSteps(rules, self.exchange, self._logs.of_parts)
        self._call = StepCall(self._guarded, self._part_steps.around, self._logs.around)
        if self._homeward is not None:
            self.executor.results_made = self._homeward.made
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._stash: list[tuple[nn.Parameter, Tensor]] | None = None
        self._optimizers: list[OwnedOptimizer] = []
        self._guards: list[Any] = []
        self._names = {p: name for name, p in self.stages.every.items()}
        self.parts = parts_of(plan, rank, module_map)
        self.is_filled, self.has_begun = True, False
        self.executor.refuse_use()

    def train_batch(
        self,
        batch: Any,
        step: Callable[..., Any],
        *rest: Any,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loss_scale: float | Tensor = 1.0,
        keeps_gradients: bool = True,
    ) -> tuple[Piece, Tensor | None]:
        """Run forward and backward of one batch over all ranks.

        Args:
            step: The user's step, which is called with a part of a batch and the rest.
            context: In which the step runs: that of its precision.
            loss_scale: Factor on every microbatch's loss before its backward.
            keeps_gradients: Whether gradients of earlier batches stay for this one to be added to. If not they are
                freed before it runs, which saves their memory.

        Returns:
            What the step gave for this rank's own batch, and the loss to return to Lightning, whose backward installs
            the gradients (None if the step returned none).
        """
        with at_work():
            own_state, guard = get_random_state(self.device), self.guard
            digest = None if self.plan.data_parallel_size is None else digest_of(batch)
            recorder = self.executor.recorder
            complete(self.buffers.before_forward())
            note = 0 if guard is None else guard.note()
            complete(recorder.around("exchange", self.exchange.run(batch, own_state, note)))
            if guard is not None:
                guard.compare(self.exchange.notes, self._gathered)
            accumulated = [(p, p.grad if keeps_gradients else None) for p in self.stages.parameters.values()]
            for parameter in self.stages.parameters.values():
                parameter.grad = None
            self._part_steps.begin()
            self._call.begin(step, rest, context)
            with (
                recorded_logs(self.module, self._logs, with_metrics=self.records_metrics),
                nullcontext() if guard is None else guard.batch(),
            ):
                earlier = [p for p, gradient in accumulated if type(gradient) is AbsentGradient]
                parts, call = self.exchange.microbatches, self._call.run_part
                complete(self.executor.run(parts, call, loss_scale=loss_scale, earlier=earlier))
            self.buffers.after_forward()
            self._stash = [(p, p.grad) for p in self.stages.parameters.values() if p.grad is not None]
            for parameter, gradient in accumulated:
                parameter.grad = given_back(gradient)
            self.exchange.forget()
            pieces = self._bring_home(self._logs.of_parts, digest)
            self._logs.forget()
            state = pieces[-1].random_state if self.exchange.whole else own_state
            set_random_state(state, self.device)
            result = combine(pieces, self.device, self._part_steps.ways)
            if result.loss is None:
                return result, None
            loss = _InstallGradients.apply(result.loss, self._anchor, self, loss_scale)  # type: ignore[no-untyped-call]
            return result, loss

    def _guarded(self, microbatch: Microbatch) -> AbstractContextManager[None]:
        return nullcontext() if self.guard is None else self.guard.run(microbatch)

    @works
    def install(self, factor: Tensor) -> None:
        """Add the schedule's gradients, times ``factor``, to the parameters' gradients; once per batch."""
        if self._stash is None:
            raise TraceError(
                "backward ran twice on the loss of one training_step: a pipelined step has its gradients only once; "
                "call backward once per step, or use a plan with a single stage"
            )
        stash, self._stash = self._stash, None
        # On a device the factor is not asked for, which would wait for all that was launched.
        if stash and not (factor.device.type == "cpu" and factor == 1.0):
            torch._foreach_mul_([gradient for _, gradient in stash], factor)
        for parameter, gradient in stash:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for elsewhere in (self.executor.gradients, self.executor.even):
            if elsewhere is not None:
                elsewhere.install(factor)

    # Whose parameters --------------------------------------------------------------------------------------------

    @works
    def take_optimizer(self, optimizer: Any) -> None:
        """Let the user's optimizer update only what this rank owns."""
        owned = OwnedOptimizer(optimizer, self.executor, self.parts, self.module_map, device=self.device)
        self._optimizers.append(owned)

    @works
    def release_optimizers(self, timeout: timedelta | None) -> list[Callable[[], dict[str, Any]]]:
        """Give optimizers all their parameters back; see :meth:`OwnedOptimizer.release` for what each returns."""
        states = [owned.release(timeout) for owned in self._optimizers]
        make_present(self.stages.every.values())
        return states

    @works
    def begin(self, initial: InitialValues | None) -> None:
        """As :meth:`hollow`; then parameters without values get those that this rank keeps, one after the other."""
        self.has_begun = True
        self.hollow()
        if initial is not None:
            initial.materialize(names_with_values(self.plan, self.module_map, self.rank), give=self._give)

    def _give(self, name: str, value: Tensor) -> None:
        part = self.parts.get(name)
        self.executor.give(name, value if part is None else part.take(value))

    @works
    def hollow(self) -> None:
        """Free the values of all parameters that other stages hold, and of parameters in parts the other ranks' parts.

        Under ZeRO-3 also those of parameters that other ranks of this stage own.

        Until they are back, ``state_dict`` of what holds them is refused: it would save nothing in their place.
        """
        if not self.is_filled:
            return
        if self.parts:
            # A graph that a reference cycle keeps (of a step that was tried, say) keeps the nodes that accumulate
            # gradients, and these insist on the shapes that parameters had when they were made.
            gc.collect()
        self.stages.free_foreign()
        for name, part in self.parts.items():
            whole = self.stages.every[name].detach()
            none = whole.as_strided(part.local_shape, [0] * whole.ndim)
            self.stages.every[name].data = none if is_hollow(whole) else part.take(whole)
        make_absent(self.stages.foreign, lambda name: held_at(self.plan, self.module_map, name))
        self.executor.engage()
        self.is_filled = False
        self._guard()

    @works
    def fill(self, home: torch.device | None = None) -> None:
        """Give every parameter its full value on every rank; what is missing here comes to ``home``, if given."""
        if self.is_filled:
            return
        self.executor.flush()
        every, absent = self.stages.every, self._absent()
        make_present(every.values())

        def deliver(name: str, value: Tensor) -> None:
            if name in absent:
                every[name].data = value.to(home or self.device, copy=True)

        complete(self.gatherer.run(deliver))
        self.executor.disengage()
        self.is_filled = True
        self._unguard()

    @works
    def leave_on_rank_zero(self) -> None:
        """At the end: give rank 0 all values in host memory, and free those of the others."""
        values = self.module_values()
        self._unguard()
        for name, part in self.parts.items():  # what has no values has the shape of the whole all the same
            self.stages.every[name].data = self.stages.every[name].new_empty(()).expand(part.shape)
        for name, parameter in self.module.named_parameters():
            parameter.grad = None
            if name in values:
                parameter.data = values[name]
            else:
                empty_out(parameter, torch.device("cpu"))
        if not values:
            why = (
                f"on rank {self.rank} after fit: a module that no device could hold is whole on rank 0 only. Read it "
                "there, or save it with trainer.save_checkpoint(path) during fit"
            )
            refuse_state_dict(self.module, is_hollow, why)
        self.is_filled = True

    @works
    def abandon(self) -> None:
        """Leave no part of a parameter that this rank has not whole: another fit must not take it for all of it."""
        for name in self._absent():
            empty_out(self.stages.every[name])
        self._unguard()

    @contextmanager
    def parts_may_leave(self) -> Iterator[None]:
        """Inside, ``state_dict`` gives what this rank has."""
        self._unguard()
        try:
            with at_work():
                yield
        finally:
            if not self.is_filled:
                self._guard()

    def _absent(self) -> set[str]:
        """The parameters of which this rank has no value, or not the whole one, while it trains."""
        return {*self.stages.foreign, *self.parts, *self.executor.away}

    def computing(self) -> AbstractContextManager[None]:
        """Inside, the whole module is what is computed with, not master weights."""
        masters, every = self.executor.masters, self.stages.every
        types = {} if masters is None else {every[name]: dtype for name, dtype in masters.types.items()}
        return computing(types) if types else nullcontext()

    def _guard(self) -> None:
        absent = {id(self.stages.every[name]) for name in self._absent()}
        stage = f"stage {' and '.join(str(stage.index) for stage in self.stages)} of {self.plan.num_stages}"
        why = (
            f"while rank {self.rank} trains {stage}: its values are away; save by trainer.save_checkpoint or "
            "fabric.save on all ranks, or read it after fit or in on_fit_end"
        )
        self._unguard()
        self._guards = refuse_state_dict(self.module, lambda parameter: id(parameter) in absent, why)

    def _unguard(self) -> None:
        for guard in self._guards:
            guard.remove()
        self._guards.clear()

    def canonical_name(self, parameter: nn.Parameter) -> str:
        """The first qualified name of a parameter of the module."""
        return self._names[parameter]

    @works
    def module_values(self) -> dict[str, Tensor]:
        """All parameters by canonical name, in host memory, on rank 0; empty on the others."""
        values: dict[str, Tensor] = {}
        self.executor.flush()

        def deliver(name: str, value: Tensor) -> None:
            values[name] = value.detach().to("cpu", copy=True)

        complete(self.gatherer.run(deliver, destination=0))
        return values

    @works
    def optimizer_state(self, optimizer: Any = None) -> dict[str, Any]:
        """Optimizer state in the layout of the whole model on rank 0; empty on the others."""
        self.executor.flush()
        return self.owned(optimizer).state()

    @works
    def load_optimizer_state(self, state: Mapping[str, Any], optimizer: Any = None) -> None:
        """Take this rank's part of optimizer state in the layout of the whole model."""
        self.executor.flush()
        self.owned(optimizer).load(state)

    # Gradients of the whole model -------------------------------------------------------------------------------

    def owned(self, optimizer: Any = None) -> OwnedOptimizer:
        """What this rank owns of one of the user's optimizers, by default of the first."""
        plain = getattr(optimizer, "_optimizer", optimizer)  # of what Lightning wraps it in
        return next((item for item in self._optimizers if item.cut.optimizer is plain), self._optimizers[0])

    def around_backward(self) -> AbstractContextManager[None]:
        """Around a backward that Lightning runs: one that hands over what is reduced already needs nothing."""
        return nullcontext()

    @works
    def clip_by_norm(
        self, optimizer: Any, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip this rank's gradients by the norm of the whole model's, which is returned.

        Args:
            norm_type: Order of the norm; another than 2 only where no gradients are in host memory.
            error_if_nonfinite: Whether to raise ``RuntimeError`` instead if the norm is not finite, as torch does.
        """
        every = {name: parameter for parameter, name in self._names.items()}
        order = [self._names[parameter] for group in self.owned(optimizer).cut.groups for parameter in group]
        speakers = self.gatherer.speakers
        offloaded = self.executor.gradients
        known = {} if offloaded is None else offloaded.norms()
        with self.executor.shown():
            norm: Tensor = complete(
                global_grad_norm(
                    *(self.executor.mesh, every, speakers, self.transport),
                    names=order,
                    norm_type=norm_type,
                    known=known,
                )
            )
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; to scale "
                "them by it all the same pass error_if_nonfinite=False"
            )
        with self.executor.shown():
            clip_by_norm(_here(optimizer), max_norm, norm)
        if offloaded is not None:
            # As torch.nn.utils.clip_grads_with_norm_ has it.
            offloaded.multiply(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    @works
    def clip_by_value(self, optimizer: Any, clip_value: float) -> None:
        """Clamp every entry of this rank's gradients."""
        with self.executor.shown():
            clip_by_value(_here(optimizer), clip_value)
        if self.executor.gradients is not None:
            self.executor.gradients.change(lambda gradients: _clamp(gradients, clip_value))

    @contextmanager
    def unscaling(self, optimizer: Any, factor: Tensor) -> Iterator[None]:
        """While gradients are multiplied by a factor: those in host memory are hidden, and will be."""
        offloaded = self.executor.gradients
        with (
            self.executor.shown(),
            gradients_aside(p for p in _parameters(optimizer) if type(p.grad) is AbsentGradient),
        ):
            yield
        if offloaded is not None:
            offloaded.multiply(factor)

    def agree_on_overflow(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """Whether any rank found a gradient that is not finite; the same answer on all ranks."""
        flag = found.get(self.device, torch.zeros((), device=self.device))
        offloaded = self.executor.gradients
        if offloaded is not None and offloaded.found is not None:
            flag = flag + offloaded.found
        if self.plan.world_size > 1:
            self.transport.all_reduce(flag, tuple(range(self.plan.world_size))).wait()
        return {self.device: flag.clamp(max=1.0)}

    # Over all ranks ----------------------------------------------------------------------------------------------

    def _gathered(self, value: Any) -> list[Any]:
        return self.transport.all_gather_object(value, self.exchange.group)

    def _bring_home(self, records: Mapping[int, tuple[Record, ...]], digest: str | None) -> list[Piece]:
        """The pieces of this rank's own batch, in the order of its rows."""
        executor, mine = self.executor, dict[int, list[Piece]]()
        # Ranks that share rows have the same results: the first of them tells.
        tells = executor.mesh.is_last and executor.mesh.row_index == 0
        copies: dict[int, Tensor] = {}
        if self._homeward is not None:
            results = results_in(executor.outputs, records) if tells else ()
            copies = self._homeward.bring([*results, *self._part_steps.tensors()])
        self._part_steps.check(copies)
        if tells:
            states = executor.random_states
            ways = self._part_steps.chunk_ways
            mine = pieces_by_owner(executor.parts, executor.outputs, records, states, copies, ways)
        if len(self.exchange.group) == 1:
            return mine[self.rank]
        with executor.recorder.phase("results", waits=True):
            every = self._gathered(mine)
            pieces = [piece for part in every for piece in part.get(self.rank, ())]
            pieces = of_loader(pieces, digest, self.plan, self.transport)
        return sorted(pieces, key=lambda piece: piece.index)


def _parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _here(optimizer: Any) -> list[nn.Parameter]:
    """What an optimizer updates whose gradients are here."""
    return [parameter for parameter in _parameters(optimizer) if type(parameter.grad) is not AbsentGradient]


def _clamp(gradients: list[Tensor], value: float) -> None:
    torch._foreach_clamp_min_(gradients, -value)
    torch._foreach_clamp_max_(gradients, value)


def connected(
    plan: Plan, module_map: ModuleMap, device: torch.device, timeout: timedelta | None = None
) -> DistributedTransport:
    """What this rank's engine for a plan talks through over torch.distributed; every rank calls it at the same time."""
    groups, pairs, talking = process_groups(plan, module_map), message_pairs(plan), talking_groups(plan)
    return DistributedTransport(groups, device, pairs=pairs, talking=talking, timeout=timeout)


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """The module's ``state_dict`` with all values on rank 0; the other ranks' parts stay where they are.

    Names, order, tied entries, buffers and the module's own state-dict hooks are as in the whole module.
    """
    if engine.is_filled:
        return module.state_dict()
    values = engine.module_values()
    with engine.parts_may_leave():
        state = module.state_dict()
    if values:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in state:
                state[name] = values[engine.canonical_name(parameter)]
    return state


# Steps that call backward themselves ------------------------------------------------------------------------------

NOT_AVERAGED = (
    "backward where gradients are not to be averaged over ranks (sync_grad=False, block_backward_sync): this plan "
    "averages behind each backward; leave it out, gradients add up all the same, or train by plain data parallelism"
)

_END, _BACKWARD = "end training_step", "run manual_backward"
_STEP, _CLIP = "step optimizer", "clip gradients of optimizer"


class ManualEngine(Engine):
    """An engine for steps that call backward, and step their optimizers, themselves: one stage, whole batches.

    The user's step runs as it is, its blocks recomputed in backward where the plan says so. Behind each of its
    backwards the gradients that it made are averaged, to their owners where optimizer state is sharded, and added to
    those that were there before; behind each step of an optimizer every rank gets what was updated. All ranks do both
    at once. Inside the user's step the groups of optimizers are those of the user, around their updates what this rank
    owns of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owns = frozenset(self.stages.parameters[item.name] for item in self.executor.mesh.owned)
        self._is_within = False
        trained = [parameter for parameter in self.stages.parameters.values() if parameter.requires_grad]
        self._watched = [p.register_post_accumulate_grad_hook(self._accumulated) for p in trained]  # type: ignore[no-untyped-call]

    def run_step(self, step: Callable[[], Any]) -> Any:
        """Run the user's step on a batch of this rank's own.

        Raises:
            TraceError: If ranks run backwards or step optimizers in different orders.
        """
        complete(self.buffers.before_forward())
        (stage,) = self.stages
        watched = nullcontext() if self.guard is None else self.guard.batch()
        with watched, self.stages.attached(), self._whole_groups():
            output = stage.forward(step, ()).value
        # DDP takes such a step for one that averages nothing, behind which each rank keeps its own buffers.
        with self.buffers.accumulating():
            self.buffers.after_forward()
        self._all_do(_END)
        return output

    # Backward ----------------------------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Around a backward of the user's: what it adds to gradients is averaged over all ranks."""
        if not self.buffers.averages:
            raise TraceError(NOT_AVERAGED)
        self._all_do(_BACKWARD)
        parameters, reducer = list(self.stages.parameters.values()), self.executor.reducer
        watched = nullcontext() if self.guard is None else self.guard.backward()
        with replaced(self, _is_within=True), gradients_aside(parameters) as gradients:
            with reducer.around_backward(), watched:
                yield
            complete(reducer.reduce())
            for index, (parameter, before) in enumerate(zip(parameters, gradients, strict=True)):
                if parameter.grad is not None:
                    gradients[index] = parameter.grad if before is None else before.add_(parameter.grad)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if not self._is_within:
            raise TraceError(
                f"{self.canonical_name(parameter)} got a gradient outside of self.manual_backward, which is not "
                "averaged over ranks: call self.manual_backward(loss) in place of loss.backward()"
            )

    # Optimizers --------------------------------------------------------------------------------------------------

    def update(self, optimizer: Any, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """Step, with a closure, what this rank owns of an optimizer, and give every rank what was updated."""
        owned = self.owned(optimizer)
        owned.check()
        self._all_do(_STEP, owned)

        def called() -> Any:
            with self._whole_groups():
                return closure()

        with owned.cut.showing(self._owns.__contains__):
            output = step(called)
            with at_work():
                owned.flush()
        with at_work():
            complete(self.executor.gather_parameters())
        return output

    @contextmanager
    def _whole_groups(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owned in self._optimizers:
                stack.enter_context(owned.cut.showing(lambda _: True))
            yield

    def release_optimizers(self, timeout: timedelta | None) -> list[Callable[[], dict[str, Any]]]:
        """As for every engine; nobody is told of gradients any longer."""
        for hook in self._watched:
            hook.remove()
        return super().release_optimizers(timeout)

    def clip_by_norm(self, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As for every engine; all ranks do it at once."""
        self._all_do(_CLIP, self.owned(optimizer))
        return super().clip_by_norm(optimizer, *args, **kwargs)

    def _all_do(self, what: str, owned: OwnedOptimizer | None = None) -> None:
        """Refuse to go on where other ranks do something else: what they exchange next would be taken for another."""
        if self.plan.world_size == 1:
            return
        numbers = range(len(self._optimizers))
        of_optimizers = [f"{word} {number}" for word in (_STEP, _CLIP) for number in numbers]
        words = (_END, _BACKWARD, *of_optimizers)
        own = words.index(what if owned is None else f"{what} {self._optimizers.index(owned)}")
        found = self.transport.all_gather(torch.tensor([own], device=self.device), tuple(range(self.plan.world_size)))
        found.wait()
        other = next((number for number in found.result().flatten().tolist() if number != own), None)
        if other is not None:
            raise TraceError(
                f"rank {self.rank} is to {what} where another is to {words[other]}: under this plan all ranks take "
                "part in every backward and step of training_step; decide by what is the same on every rank, such as "
                "batch_idx, or train by plain data parallelism"
            )
