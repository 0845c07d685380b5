"""A plan against a single process: the same batches, and what must be equal.

All ranks of a plan run in this process over :class:`InMemoryWorld`, each with its own copy of the module. The reference
is the mean over the ranks' batches of the loss of the user's step on the whole batch.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_mist.model.cuts.mapping import map_module
from lightning_mist.plan import (
    ModuleMap,
    OffloadRatios,
    Plan,
    row_slice,
)
from lightning_mist.runtime.communication.transport import Transport, Work
from lightning_mist.runtime.executor import Executor, Microbatch
from lightning_mist.runtime.parameters.gather import ParameterGatherer
from lightning_mist.runtime.parameters.optimizer_cut import (
    clip_by_norm,
    gather_optimizer_state,
    global_grad_norm,
    restrict_optimizer,
)
from lightning_mist.runtime.parameters.parameter_parts import AnyPart, Part, parts_of
from lightning_mist.runtime.stage.pipeline_stage import make_stages
from lightning_mist.schedule import Action
from lightning_mist.schedule.lowering import lower
from lightning_mist.tensors import batch_rows, slice_rows
from tests.memory_transport import InMemoryWorld, drive
from tests.plans import plan_of

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference of a gradient from the reference, relative to the largest entry of any gradient or to 1."""


@dataclass
class Outcome:
    """Loss of every rank's batch, gradients by parameter, the random state that every batch left, and ranks' parts."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor | None]]
    states: dict[int, Tensor] = field(default_factory=dict)
    parts: list[dict[str, AnyPart]] = field(default_factory=list)


@contextmanager
def precision_of(module: nn.Module) -> Iterator[None]:
    """Runs a module in its precision: whatever a module in double precision wants in single precision is in double.

    Many library models normalise, take softmax or compute their loss in single precision whatever their dtype, which
    would hide wrong gradients below 1e-8. (A torch function mode would not reach recomputation in backward.)
    """
    if next(module.parameters()).dtype is not torch.float64:
        yield
        return

    def in_double(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(torch.float64 if item is torch.float32 else item for item in args)
            return function(
                *args, **{key: torch.float64 if item is torch.float32 else item for key, item in kwargs.items()}
            )

        return wraps(function)(call)

    to = in_double(Tensor.to)
    to.__module__, to.__qualname__ = "torch", "Tensor.to"  # Where other processes find it, as they do torch's own.
    with (
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(Tensor, "to", to),
        mock.patch.object(nn.functional, "softmax", in_double(nn.functional.softmax)),
        mock.patch.object(torch, "zeros", in_double(torch.zeros)),
    ):
        yield


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have this dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def make_plan(
    layers: Sequence[int],
    *,
    degrees: Sequence[int] | None = None,
    parts: int = 1,
    rows: int = 4,
    schedule: str = "1f1b",
    chunks: int = 1,
    offload: OffloadRatios | None = None,
    checkpointed: int | Sequence[int] = 0,
    **options: Any,
) -> Plan:
    """A plan from the number of layers of each stage.

    Args:
        layers: Layers per stage.
        degrees: Data-parallel degree per group of devices; 1 each if None.
        parts: Microbatches per batch of a rank in a replica whose stages have degree 1.
        rows: Rows per rank.
        schedule: Name of the schedule.
        chunks: Stages per group of devices.
        offload: What every stage keeps in host memory.
        checkpointed: Checkpointed layers at most, of all stages or each.
        **options: ``zero`` of stages, ``tensor``, ``context``, ``sequence`` and ``shard`` of groups: of all or of each.
    """
    groups = len(layers) // chunks
    degrees = [1] * groups if degrees is None else degrees
    made = []
    for index, size in enumerate(layers):
        stage = {"layers": size, "data": degrees[index % groups], "offload": asdict(offload or OffloadRatios())}
        for name, value in {"checkpointed": checkpointed, **options}.items():
            at = index if name in ("zero", "checkpointed") else index % groups
            stage[name] = value[at] if isinstance(value, Sequence) else value
        made.append({**stage, "checkpointed": min(size, stage["checkpointed"])})
    world = sum(stage["data"] * stage.get("tensor", 1) * stage.get("context", 1) for stage in made[:groups])
    replicas = next(g for g in range(world, 0, -1) if all(degree % g == 0 for degree in degrees))
    return plan_of(rows * world, parts * world // replicas, *made, groups=groups, schedule=schedule)


def map_of(module: nn.Module, batch: Any, *, even_shards: bool = True) -> ModuleMap:
    """Where a module can be cut, from its own step on a batch."""
    rows = batch_rows(batch)
    second = slice_rows(batch, 0, rows - 1) if rows is not None and rows > 1 else None
    with precision_of(module):
        found = map_module(module, lambda value: module.training_step(value, 0), batch, second_batch=second)
    return replace(found, even_shards=even_shards)


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def reference(module: nn.Module, batches: Sequence[Any], *, states: Sequence[Tensor] | None = None) -> Outcome:
    """What a single process gives: mean over batches of each batch's loss."""
    module = copy.deepcopy(module)
    losses, after = [], {}
    for rank, batch in enumerate(batches):
        if states is not None:
            torch.set_rng_state(states[rank])
        with precision_of(module):
            loss = loss_of(module.training_step(batch, 0))
            (loss / len(batches)).backward()
        losses.append(loss.detach())
        after[rank] = torch.get_rng_state()
    return Outcome(losses, [{name: p.grad for name, p in module.named_parameters()}], after)


def microbatches(
    plan: Plan, rank: int, batches: Sequence[Any], *, states: Sequence[Tensor] | None = None, seed: int | None = None
) -> list[Microbatch]:
    """What a rank computes on, cut from everybody's batches."""
    result = []
    for index in range(plan.num_microbatches):
        piece = row_slice(plan, rank, index)
        batch = batches[piece.owner]
        rows = batch_rows(batch)
        low, high = piece.rows(rows) if rows is not None else (0, 1)
        result.append(
            Microbatch(
                value=batch if piece.parts == 1 else slice_rows(batch, low, high),
                weight=(high - low) / (rows or 1),
                owner=piece.owner,
                index=index,
                batch_rows=rows,
                rows=None if piece.parts == 1 else (low, high),
                random_state=None if states is None else states[piece.owner],
                seed=seed,
            )
        )
    return result


@dataclass
class Rank:
    """One rank: its copy of the module and its executor."""

    module: nn.Module
    executor: Executor
    plan: Plan
    parts: dict[str, Part]

    @classmethod
    def make(
        cls,
        module: nn.Module,
        module_map: ModuleMap,
        plan: Plan,
        rank: int,
        transport: Transport,
        masters: dict[str, Tensor] | None = None,
    ) -> "Rank":
        stages = make_stages(module, module_map, plan, rank, transport)
        actions = actions_of(plan, module_map, rank)
        parts = parts_of(plan, rank, module_map)
        executor = Executor(plan, rank, stages, module_map, transport, actions, masters=masters)
        for name, part in parts.items():
            executor.parameters[name].data = part.take(executor.parameters[name].detach())
        return cls(module, executor, plan, parts)

    def run(self, parts: Sequence[Microbatch], *, loss_scale: float = 1.0) -> Iterator[Work]:
        return self.executor.run(parts, self.step, loss_scale=loss_scale)

    def step(self, microbatch: Microbatch) -> Any:
        return self.module.training_step(microbatch.value, microbatch.index)

    def losses(self, parts: Sequence[Microbatch]) -> dict[int, float]:
        """Share of each owner's loss that was computed here; tensor-parallel peers compute the same."""
        if self.executor.mesh.row_index > 0:
            return {}
        found: dict[int, Any] = {}
        for part, output in zip(self.executor.parts, self.executor.outputs, strict=True):
            if output is not None and loss_of(output) is not None:
                found[part.owner] = found.get(part.owner, 0.0) + part.weight * loss_of(output).detach()
        return found

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients that this rank's optimizer would use, or its parts of them."""
        with self.showing():
            updated = set(self.executor.updated)
            return {name: p.grad for name, p in self.executor.parameters.items() if p in updated}

    def every_part(self) -> dict[str, AnyPart]:
        """What this rank has of parameters that it has not all of."""
        return {**self.parts, **self.executor.even.parts}

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Inside, parameters have the gradients of a batch that has run, this rank's pieces where it has these."""
        self.executor.even.install(torch.ones(()))
        with self.executor.shown():
            yield

    def gathered(self) -> dict[str, int]:
        """How often a function needed the whole of a split tensor."""
        return {
            name: count
            for stage in self.executor.stages
            if stage.split
            for name, count in stage.split.context.gathered.items()
        }

    def states(self, parts: Sequence[Microbatch]) -> dict[int, Tensor]:
        return {
            part.owner: state
            for part, state in zip(self.executor.parts, self.executor.random_states, strict=True)
            if state is not None
        }


def actions_of(plan: Plan, module_map: ModuleMap, rank: int) -> tuple[Action, ...]:
    tied = any(len(stages) > 1 for stages in module_map.owners(plan.bounds).values())
    return lower(plan, tied=tied)[plan.stage_of(rank)]


def run_plan(
    module: nn.Module,
    module_map: ModuleMap,
    plan: Plan,
    batches: Sequence[Any],
    *,
    states: Sequence[Tensor] | None = None,
    seed: int | None = None,
    loss_scale: float = 1.0,
    seen: Callable[[Sequence[Rank]], None] = lambda ranks: None,
) -> Outcome:
    """All ranks of a plan in this process; ``seen`` is shown them at the end."""
    world = InMemoryWorld(plan.world_size)
    ranks = [
        Rank.make(copy.deepcopy(module), module_map, plan, rank, transport)
        for rank, transport in enumerate(world.transports)
    ]
    parts = [microbatches(plan, rank, batches, states=states, seed=seed) for rank in range(plan.world_size)]
    with precision_of(module):
        drive([rank.run(mine, loss_scale=loss_scale) for rank, mine in zip(ranks, parts, strict=True)])
    assert world.pending == ()
    seen(ranks)
    return collect(
        [rank.losses(mine) for rank, mine in zip(ranks, parts, strict=True)],
        [rank.gradients() for rank in ranks],
        [rank.states(mine) for rank, mine in zip(ranks, parts, strict=True)],
        [rank.every_part() for rank in ranks],
    )


def collect(
    losses: Sequence[dict[int, Any]],
    gradients: Sequence[dict[str, Any]],
    states: Sequence[dict[int, Tensor]],
    parts: Sequence[dict[str, AnyPart]] | None = None,
) -> Outcome:
    owners = sorted({owner for part in losses for owner in part})
    total = [sum(part[owner] for part in losses if owner in part) for owner in owners]
    merged = {owner: state for part in states for owner, state in part.items()}
    return Outcome(total, list(gradients), merged, list(parts or [{}] * len(gradients)))


def assert_equal(outcome: Outcome, expected: Outcome, *, scale: float = 1.0, tolerance: float | None = None) -> None:
    """Losses and every copy of every gradient are those of the reference; no parameter is missing."""
    tolerance = TOLERANCE[expected.losses[0].dtype] if tolerance is None else tolerance
    assert len(outcome.losses) == len(expected.losses)
    for rank, (loss, wanted) in enumerate(zip(outcome.losses, expected.losses, strict=True)):
        assert abs(loss - wanted) <= tolerance * max(1.0, abs(wanted)), f"loss of rank {rank}: {loss}, not {wanted}"
    (reference_gradients,) = expected.gradients
    largest = max((g.abs().max().item() for g in reference_gradients.values() if g is not None), default=1.0)
    for rank, gradients in enumerate(outcome.gradients):
        for name, gradient in gradients.items():
            wanted = reference_gradients[name]
            if wanted is None:
                assert gradient is None, f"{name} on rank {rank} has a gradient"
                continue
            assert gradient is not None, f"{name} on rank {rank} has no gradient"
            part = outcome.parts[rank].get(name) if outcome.parts else None
            if part is not None:
                wanted = part.take(wanted)
            difference = (gradient / scale - wanted).abs().max().item() if gradient.numel() else 0.0
            assert difference <= tolerance * max(1.0, largest), f"{name} on rank {rank}: off by {difference}"
    missing = set(reference_gradients) - {name for gradients in outcome.gradients for name in gradients}
    assert not missing, f"no rank has {sorted(missing)}"


MAX_NORM = 0.5
"""Gradients are clipped to this in training: small enough to bind."""


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """As users do: matrices decay, the rest does not.

    A large ``eps`` keeps Adam from blowing up the rounding of gradients that are all but zero.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        eps=1e-3,
    )


@dataclass
class Trained:
    """Losses per step of each owner's batch, and after the last step all parameters and the optimizer's state."""

    losses: list[dict[int, Any]]
    parameters: dict[str, Tensor]
    optimizer: dict[str, Any] | None


def train_reference(
    module: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    max_norm: float = MAX_NORM,
) -> Trained:
    """Clipped AdamW steps in a single process; ``steps`` holds the ranks' batches of each step."""
    module = copy.deepcopy(module)
    optimizer = optimize(module)
    losses = []
    for batches in steps:
        optimizer.zero_grad()
        found = {}
        for rank, batch in enumerate(batches):
            with precision_of(module):
                loss = loss_of(module.training_step(batch, 0))
                (loss / len(batches)).backward()
            found[rank] = loss.detach()
        losses.append(found)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
        optimizer.step()
    return Trained(losses, {name: p.detach() for name, p in module.named_parameters()}, optimizer.state_dict())


def train(
    module: nn.Module,
    module_map: ModuleMap,
    plan: Plan,
    steps: Sequence[Sequence[Any]],
    transport: Transport,
    masters: dict[str, Tensor] | None = None,
    optimize: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    max_norm: float = MAX_NORM,
) -> Generator[Work, None, Trained]:
    """The same steps as one rank of a plan, and everything brought together at the end (optimizer state on rank 0).

    Drive it inside :func:`precision_of`.
    """
    rank = Rank.make(module, module_map, plan, transport.rank, transport, masters)
    stages, mesh = rank.executor.stages, rank.executor.mesh
    optimizer = optimize(module)
    every = stages.every
    name_of = {parameter: name for name, parameter in every.items()}
    order = [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    shared = {stages.parameters[name]: part for name, part in rank.every_part().items()}
    cut = restrict_optimizer(optimizer, rank.executor.updated, shared)
    stages.free_foreign()
    gatherer = ParameterGatherer(plan, transport.rank, every, module_map, transport, rank.executor.even.shards)
    losses = []
    for batches in steps:
        parts = microbatches(plan, transport.rank, batches)
        optimizer.zero_grad()
        yield from rank.run(parts)
        losses.append(rank.losses(parts))
        with rank.showing():
            norm = yield from global_grad_norm(mesh, every, gatherer.speakers, transport, names=order)
            clip_by_norm(stages.parameters.values(), max_norm, norm)
            optimizer.step()
        yield from rank.executor.gather_parameters()
    values: dict[str, Tensor] = {}
    yield from gatherer.run(lambda name, value: values.update({name: value.clone()}))
    state = yield from gather_optimizer_state(cut, transport)
    return Trained(losses, values, state)


def assert_trained_equal(ranks: Sequence[Trained], expected: Trained, *, tolerance: float = 1e-9) -> None:
    """Every rank ends with the parameters of the reference, and the losses on the way are its losses."""
    for step, wanted in enumerate(expected.losses):
        for owner, loss in wanted.items():
            total = sum(rank.losses[step].get(owner, 0.0) for rank in ranks)
            torch.testing.assert_close(total, loss, rtol=tolerance, atol=tolerance)
    for rank in ranks:
        assert rank.parameters.keys() == expected.parameters.keys()
        for name, value in expected.parameters.items():
            torch.testing.assert_close(rank.parameters[name], value, rtol=tolerance, atol=tolerance)
    state, wanted = ranks[0].optimizer, expected.optimizer
    assert state is not None
    assert wanted is not None
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys()
    for number, entry in wanted["state"].items():
        for key, value in entry.items():
            mine = state["state"][number][key]
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance)
    assert all(rank.optimizer is None for rank in ranks[1:])
