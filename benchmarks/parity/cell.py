"""One model under one plan against a single process: losses, gradients of two accumulated batches, curves.

All ranks run in this process, each with its own copy of the module, by the same engine that runs under Lightning.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from benchmarks.parity.masters import Masters
from benchmarks.parity.plans import ROWS, Layout, make_plan
from lightning_mist.errors import PlanError
from lightning_mist.model import derive_contexts, derive_splits
from lightning_mist.plan import ModuleMap, Plan, loader_of
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.communication.transport import complete
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.parameters.parameter_parts import AnyPart, parts_of, pieces_of
from lightning_mist.schedule.flats import stage_flats
from lightning_mist.strategy.planning.division_proofs import prove_here
from lightning_mist.strategy.training.engine import Engine
from tests import zoo
from tests.integration.parity import TOLERANCE, cast, loss_of, make_optimizer, map_of, precision_of
from tests.memory_transport import InMemoryWorld, drive

T = TypeVar("T")

Optimize = Callable[[nn.Module], torch.optim.Optimizer]

Curve = tuple[list[list[Tensor]], dict[str, Tensor]]
"""Losses by rank and step, and the parameters after the last."""

Gradients = tuple[list[Tensor], dict[str, Tensor | None]]
"""A rank's losses by step, and gradients by canonical name."""

ACCUMULATED = 2
"""Batches of each rank whose gradients are added up before they are compared."""

CURVE_STEPS = 20

CLIP_NORM = 0.05
"""Curves clip gradients to this norm: below that of every model here, so that clipping always binds."""

DEGREES = (2, 4)
"""Tensor- and context-parallel degrees that models are asked for."""

IN_16_BITS = 1e-4
"""Tolerance of master weights in bfloat16, a 40th of its unit in the last place.

Gradients that are rounded once more or less are off by 5e-4 and more, and most models agree to the bit. The last block
of T5 adds up gradients of values that it uses several times in another order than in one process, in bfloat16: 8e-5 (in
single precision, 8e-8).
"""

CPU = torch.device("cpu")

_MOST_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model of the zoo in one precision, with its map and batches: ``batches[step][rank]``.

    With master weights parameters of ``module`` are the masters, and ``dtype`` is the type that is computed in.
    ``tokens`` is what chunks of these compute, if plans have such.
    """

    name: str
    module: nn.Module
    module_map: ModuleMap
    batches: tuple[tuple[Any, ...], ...]
    dtype: torch.dtype
    has_masters: bool = False
    tokens: CutRules | None = None

    @property
    def tolerance(self) -> float:
        """Largest difference that is rounding."""
        return IN_16_BITS if self.dtype is torch.bfloat16 else TOLERANCE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a plan's numbers differ from a single process's.

    Attributes:
        loss: Largest difference of a rank's loss, relative to the loss or to 1.
        gradient: Largest difference of an entry of a gradient, relative to the largest entry of any; of a curve,
            largest difference of a parameter at its end, relative to its largest entry or to 1.
        differing: First parameter (or rank's loss) that differs by more than the tolerance, in words; empty if none.
        refused: Why the plan does not run, empty if it does.
    """

    loss: float = 0.0
    gradient: float = 0.0
    differing: str = ""
    refused: str = ""

    @property
    def text(self) -> str:
        """In a word."""
        if self.refused:
            return "refused"
        return "differs" if self.differing else f"{max(self.loss, self.gradient):.1e}"


@cache
def subject(name: str, dtype: torch.dtype, device: torch.device = CPU, masters: torch.dtype | None = None) -> Subject:
    """A model, where it can be cut and how it can be split, and batches for as many ranks and steps as any plan needs.

    Args:
        name: Name in the zoo.
        dtype: Precision of its parameters and batches.
        device: Where they are, once the map is made.
        masters: Precision of master weights, if it has any.
    """
    module, _ = zoo.make(name)
    master = copy.deepcopy(module).to(masters or dtype)
    module.to(dtype)
    batches = make_batches(name, dtype)
    module_map = map_of(module, batches[0][0])

    def call(batch: Any) -> Any:
        return module.training_step(batch, 0)

    with precision_of(module):
        module_map = derive_splits(module, call, batches[0][0], module_map, DEGREES)
        module_map = derive_contexts(module, call, batches[0][0], module_map, DEGREES)
    batches = tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
    return Subject(
        name=name,
        module=master.to(device),
        module_map=module_map,
        batches=batches,
        dtype=dtype,
        has_masters=masters is not None,
    )


def make_batches(name: str, dtype: torch.dtype, *, seed: int = 7, rows: int = ROWS) -> tuple[tuple[Any, ...], ...]:
    """Batches of a model of the zoo by step and rank."""
    torch.manual_seed(seed)
    _, make_batch = zoo.make(name)
    return tuple(tuple(cast(make_batch(rows), dtype) for _ in range(_MOST_RANKS)) for _ in range(ACCUMULATED))


def on_all_ranks(subject: Subject, plan: Plan, work: Callable[[Engine], T]) -> list[T]:
    """Run a function with the engine of every rank of a plan, all in this process; what each returned."""
    world = InMemoryWorld(plan.world_size)

    def rank(transport: Any) -> Any:
        module, masters = copy.deepcopy(subject.module), None
        device = next(module.parameters()).device
        if subject.has_masters:
            masters = {name: p.data for name, p in module.named_parameters() if p.requires_grad}
            module.to(subject.dtype)
        rules = None if subject.tokens is None else CutRules(tokens=subject.tokens.bound_to(module))
        engine = Engine(module, plan, subject.module_map, transport, device=device, masters=masters, rules=rules)
        return work(engine)
        yield  # what the rank waits for it waits for inside

    with nullcontext() if subject.has_masters else precision_of(subject.module):
        results: list[T] = drive([rank(transport) for transport in world.transports])
    if world.pending:
        raise AssertionError(f"left over: {world.pending}")
    return results


def train_batch(engine: Engine, batch: Any) -> Tensor:
    """One batch through the engine, its gradients added to the parameters'; this rank's loss."""
    result, loss = engine.train_batch(copy.copy(batch), lambda part: engine.module.training_step(part, 0))
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    assert result.loss is not None
    return result.loss.detach()


def attempt(compare: Callable[[Subject, Plan], Outcome], subject: Subject, layout: Layout, rows: int = ROWS) -> Outcome:
    """What a comparison gives, or why the plan does not run."""
    try:
        return compare(_under(subject, layout), make_plan(layout, len(subject.module_map.blocks), rows=rows))
    except PlanError as error:
        return Outcome(refused=str(error))


@cache
def _under(subject: Subject, layout: Layout) -> Subject:
    """A subject with what is known of it where it trains by a layout.

    Raises:
        PlanError: If its tokens cannot be cut into chunks.
    """
    if not layout.cuts_tokens:
        return replace(subject, module_map=replace(subject.module_map, even_shards=False)) if layout.whole else subject
    # What stands for functions of torch's in double precision cannot be followed.
    dtype = torch.float32 if subject.dtype is torch.float64 else subject.dtype
    module, batch, reasons = copy.deepcopy(subject.module).to(dtype), cast(subject.batches[0][0], dtype), list[str]()
    for lap in (0, 1):
        found = prove_here(module, subject.module_map.blocks, partial(_step, module), batch, lap)
        if isinstance(found, CutRules):
            return replace(subject, module_map=replace(subject.module_map, lap=lap), tokens=found)
        reasons.append(found)
    raise PlanError("; ".join(reasons))


def _step(module: nn.Module, batch: Any) -> Any:
    return module.training_step(batch, 0)  # type: ignore[operator]


def compare_gradients(subject: Subject, plan: Plan) -> Outcome:
    """Losses and gradients of :data:`ACCUMULATED` batches per rank."""
    return judge_gradients(subject, plan, on_all_ranks(subject, plan, lambda engine: gradients_of(subject, engine)))


def gradients_of(subject: Subject, engine: Engine) -> Gradients:
    """One rank's losses, and the gradients of what it updates (parts of them where it has parts)."""
    engine.take_optimizer(make_optimizer(engine.module))
    engine.hollow()
    losses = [train_batch(engine, batch) for batch in _of_rank(subject, engine.plan, engine.rank)]
    updated = set(engine.executor.updated)
    if (moved := engine.executor.gradients) is not None:
        moved.lend(moved.names)
    with engine.executor.shown():
        return losses, {name: p.grad for name, p in engine.stages.parameters.items() if p in updated}


def judge_gradients(subject: Subject, plan: Plan, ranks: Sequence[Gradients]) -> Outcome:
    """What all ranks of a plan found, against a single process."""
    losses, gradients = _with_masters(subject, plan) if subject.has_masters else _reference(subject, plan)
    loss, differing = _loss_difference(subject, [found for found, _ in ranks], losses)
    worst, which = _gradient_difference(subject, plan, [mine for _, mine in ranks], gradients)
    return Outcome(loss=loss, gradient=worst, differing=differing or which)


def _of_rank(subject: Subject, plan: Plan, rank: int) -> list[Any]:
    """The batches that a rank loads, by step."""
    return [step[loader_of(plan, rank)] for step in subject.batches]


def _by_rank(plan: Plan, by_loader: Sequence[T]) -> list[T]:
    return [by_loader[loader_of(plan, rank)] for rank in range(plan.world_size)]


def _reference(subject: Subject, plan: Plan) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
    """Losses by rank and step, and summed gradients, of a single process."""
    module, loaders = copy.deepcopy(subject.module), plan.num_loaders
    losses: list[list[Tensor]] = [[] for _ in range(loaders)]
    for step in subject.batches:
        for loader, batch in enumerate(step[:loaders]):
            losses[loader].append(_backward(module, batch, loaders))
    return _by_rank(plan, losses), {name: parameter.grad for name, parameter in module.named_parameters()}


def _with_masters(subject: Subject, plan: Plan) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
    """The same by the arithmetic of master weights, which depends on the plan."""
    masters = Masters.of(subject.module, subject.dtype)
    every = zip(*(_of_rank(subject, plan, rank) for rank in range(plan.world_size)), strict=True)
    steps = [masters.train_batch(plan, subject.module_map, step) for step in every]
    losses = [list(of_rank) for of_rank in zip(*steps, strict=True)]
    return losses, {name: parameter.grad for name, parameter in masters.module.named_parameters()}


def _backward(module: nn.Module, batch: Any, loaders: int) -> Tensor:
    with precision_of(module):
        loss = loss_of(module.training_step(copy.copy(batch), 0))  # type: ignore[operator]
        (loss / loaders).backward()
    return loss.detach()


def _loss_difference(
    subject: Subject, found: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]
) -> tuple[float, str]:
    worst, differing = 0.0, ""
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for step, (loss, expected) in enumerate(zip(mine, theirs, strict=True)):
            difference = float(abs(loss - expected)) / max(1.0, float(abs(expected)))
            if not difference <= subject.tolerance and not differing:
                differing = f"loss of rank {rank} in step {step}: {float(loss)}, not {float(expected)}"
            worst = max(worst, difference)
    return worst, differing


def _gradient_difference(
    subject: Subject, plan: Plan, ranks: Sequence[dict[str, Tensor | None]], wanted: dict[str, Tensor | None]
) -> tuple[float, str]:
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    worst, differing, missing = 0.0, "", {}
    for rank, gradients in enumerate(ranks):
        mesh = make_mesh(plan, rank, subject.module_map)
        pieces = pieces_of(mesh, subject.module_map, stage_flats(plan, subject.module_map, mesh.stage))
        parts: dict[str, AnyPart] = {**parts_of(plan, rank, subject.module_map), **pieces}
        for name, gradient in gradients.items():
            part, whole = parts.get(name), wanted[name]
            every = (0,) if part is None else [i for i in range(part.degree) if 0 not in part.shape_at(i)]
            missing.setdefault(name, set(every)).discard(0 if part is None else part.index)
            difference = _difference(gradient, whole if part is None or whole is None else part.take(whole)) / largest
            if not difference <= subject.tolerance and not differing:
                differing = f"gradient of {name} on rank {rank}: off by {difference:.1e}"
            worst = max(worst, difference)
    absent = [name for name in wanted if missing.get(name, {0})]
    return worst, differing or (f"no rank has {absent[0]}" if absent else "")


def _difference(found: Tensor | None, wanted: Tensor | None) -> float:
    if found is None or wanted is None:
        return 0.0 if found is wanted else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    return float((found - wanted).abs().max()) if found.numel() else 0.0


def compare_curves(subject: Subject, plan: Plan, optimize: Optimize = make_optimizer) -> Outcome:
    """Losses of :data:`CURVE_STEPS` clipped steps, of AdamW unless told, and the parameters after the last."""

    def work(engine: Engine) -> tuple[list[Tensor], dict[str, Tensor]]:
        optimizer = optimize(engine.module)
        engine.take_optimizer(optimizer)
        engine.hollow()
        losses = []
        for step in range(CURVE_STEPS):
            optimizer.zero_grad()
            losses.append(train_batch(engine, _batch(subject, step, loader_of(plan, engine.rank))))
            engine.clip_by_norm(optimizer, CLIP_NORM)
            optimizer.step()
            complete(engine.executor.gather_parameters())
        return losses, engine.module_values()

    ranks = on_all_ranks(subject, plan, work)
    if subject.has_masters:
        losses, parameters = _curve_with_masters(subject, plan, optimize)
    else:
        of_loaders, parameters = _reference_curve(subject, plan.num_loaders, optimize)
        losses = _by_rank(plan, of_loaders)
    loss, differing = _loss_difference(subject, [found for found, _ in ranks], losses)
    values, worst = ranks[0][1], 0.0
    for name, wanted in parameters.items():
        difference = _difference(values.get(name), wanted) / max(1.0, float(wanted.abs().max()))
        if not difference <= subject.tolerance and not differing:
            differing = f"{name} after {CURVE_STEPS} steps: off by {difference:.1e}"
        worst = max(worst, difference)
    return Outcome(loss=loss, gradient=worst, differing=differing)


def _batch(subject: Subject, step: int, loader: int) -> Any:
    """Another batch in every step, of those that there are."""
    return subject.batches[step % ACCUMULATED][(loader + step // ACCUMULATED) % _MOST_RANKS]


@cache
def _reference_curve(subject: Subject, loaders: int, optimize: Optimize) -> Curve:
    """Losses by loader and step."""
    module = copy.deepcopy(subject.module)
    optimizer = optimize(module)
    losses: list[list[Tensor]] = [[] for _ in range(loaders)]
    for step in range(CURVE_STEPS):
        optimizer.zero_grad()
        for loader in range(loaders):
            losses[loader].append(_backward(module, _batch(subject, step, loader), loaders))
        _clipped_step(optimizer)
    return losses, {name: parameter.detach() for name, parameter in module.named_parameters()}


def _curve_with_masters(subject: Subject, plan: Plan, optimize: Optimize) -> Curve:
    masters = Masters.of(subject.module, subject.dtype)
    optimizer = optimize(masters.module)
    steps = []
    for step in range(CURVE_STEPS):
        optimizer.zero_grad()
        batches = _by_rank(plan, [_batch(subject, step, loader) for loader in range(plan.num_loaders)])
        steps.append(masters.train_batch(plan, subject.module_map, batches))
        _clipped_step(optimizer)
    return [list(of_rank) for of_rank in zip(*steps, strict=True)], masters.values()


def _clipped_step(optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], CLIP_NORM)
    optimizer.step()
