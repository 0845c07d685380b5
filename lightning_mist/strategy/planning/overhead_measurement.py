"""What the runtime's own Python takes on this host, measured by running it on a module with next to no computation.

The very engine that trains runs a few batches of a tiny network on all ranks, under plans that each have one thing more
than another, and its recorder tells how long every action took without waiting for other ranks. What the network itself
takes, measured without the engine, is taken off.
"""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.cost.time import SPLIT_BACKWARD, collective_seconds
from lightning_mist.hardware import HardwareProfile, StepOverheads
from lightning_mist.model import derive_splits, map_module
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.grid import plan_of
from lightning_mist.runtime.recording import Recorded
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.strategy.all_ranks import of_all_ranks
from lightning_mist.strategy.training import start_engine

WARM_UP, TIMED = 3, 9
"""Batches of every plan: the first make shapes known and caches warm, the others are timed."""

LAYERS, WIDTH, LENGTH, ROWS = 4, 128, 256, 4
"""Sizes of the network: a layer's activations fill a core's own cache, so that the runtime's Python finds it cold after
every layer, as in training (with 16 instead of 128 x 256 numbers per row it ran three times faster)."""

_MESSAGES = (ActionKind.SEND_ACTIVATION, ActionKind.RECV_ACTIVATION, ActionKind.SEND_GRADIENT, ActionKind.RECV_GRADIENT)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class _Network(nn.Module):
    """A head of a few operators, blocks of a few more, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList([_Block() for _ in range(LAYERS)])

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch) + self.position
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.square().mean()
        return loss


HEAD_OPERATORS, BLOCK_OPERATORS, BLOCK_BACKWARD_OPERATORS = 2, 5, 15
"""Operators of the head and of a block in forward, and of a block in backward, as the trace counts them."""

UNIT_MOVES = 3 * (LAYERS + 1) - 4
"""Units that are unsharded and reduced in a forward and a backward between others under ZeRO-3: the two outermost units
are there already where these follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Medians over batches, of one rank, in seconds; of single actions by their kind, without waits.

    Attributes:
        around: Whole batches less all actions: exchanging batches and losses, installing gradients, waits included.
    """

    first_stage: bool
    around: float
    seconds: dict[ActionKind, float]


def measure_overheads(profile: HardwareProfile, device: torch.device, world_size: int) -> StepOverheads:
    """Measure the runtime on all ranks at once; every rank calls this and gets the same.

    On a CUDA device the host launches ahead of the device, so nothing is measured there: nothing is added. What the
    profile's collectives take is no overhead.
    """
    if device.type == "cuda":
        return StepOverheads()
    # Blocking garbage collections of what planning has left would be taken for the runtime's own.
    gc.collect()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        module, batch = _Network().to(device), torch.randn(ROWS, LENGTH, WIDTH, device=device)
        found = map_module(module, module.training_step, batch, blocks="blocks")
        plain = _plain(module, batch[:1])
        runs = {"data": _run(module, found, batch, device, _plan(world_size, zero_stage=1))}
        recomputing = _plan(world_size, zero_stage=1, checkpointed_layers="all")
        runs["recomputed"] = _run(module, found, batch, device, recomputing)
        if world_size % 2 == 0:
            runs["pipeline"] = _run(module, found, batch, device, _plan(world_size, pipeline_stages=2))
            split_backward = _plan(world_size, pipeline_stages=2, schedule="zb-h1")
            runs["split backward"] = _run(module, found, batch, device, split_backward)
            split = derive_splits(module, module.training_step, batch, found, (2,))
            if split.splits:
                runs["tensor"] = _run(module, split, batch, device, _plan(world_size, tensor_parallel_degree=2))
        if world_size > 1:
            runs["shards"] = _run(module, found, batch, device, _plan(world_size, zero_stage=3))
    return _same(_overheads(profile, runs, plain))


def _plan(world_size: int, **degrees: Any) -> Plan:
    """Every microbatch has one row on each data-parallel rank."""
    return plan_of(LAYERS, world_size=world_size, global_batch_size=ROWS * world_size, microbatch_size=1, **degrees)


def _plain(module: _Network, batch: Tensor) -> tuple[float, float]:
    """Seconds of the forward and the backward of one row without the engine."""
    forwards, backwards = [], []
    for _ in range(WARM_UP + 2 * TIMED):
        start = perf_counter()
        loss = module.training_step(batch)
        middle = perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        forwards.append(middle - start)
        backwards.append(perf_counter() - middle)
    module.zero_grad()
    return median(forwards[WARM_UP:]), median(backwards[WARM_UP:])


def _run(module: _Network, found: ModuleMap, batch: Tensor, device: torch.device, plan: Plan) -> _Run:
    """Run some batches of a plan, as the strategy does, without an optimizer."""
    engine = start_engine(module, plan, found, device=device, timeout=None)
    engine.begin(None)
    around: list[float] = []
    kinds: dict[ActionKind, list[float]] = {}
    for index in range(WARM_UP + TIMED):
        engine.executor.recorder.is_on = index >= WARM_UP
        start = perf_counter()
        _, loss = engine.train_batch(batch, module.training_step, keeps_gradients=False)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        seconds = perf_counter() - start
        module.zero_grad()
        records = engine.executor.recorder.take()
        if index >= WARM_UP:
            around.append(seconds - sum(item.seconds for item in records if isinstance(item.action, Action)))
        _sort(records, kinds)
    engine.fill()
    engine.transport.close()
    return _Run(
        first_stage=plan.stage_of(dist.get_rank()) == 0,
        around=median(around),
        seconds={kind: median(values) for kind, values in kinds.items()},
    )


def _sort(records: Sequence[Recorded], kinds: dict[ActionKind, list[float]]) -> None:
    for record in records:
        if isinstance(record.action, Action):
            kinds.setdefault(record.action.kind, []).append(record.seconds - record.waited_seconds)


def _overheads(profile: HardwareProfile, runs: dict[str, _Run], plain: tuple[float, float]) -> StepOverheads:
    data = runs["data"]
    action = (_computing(data) - sum(plain)) / 2
    found = {"step_seconds": data.around, "action_seconds": action}
    if (recomputed := runs.get("recomputed")) is not None:
        more = _computing(recomputed) - _computing(data) - plain[0]
        found["recomputed_layer_seconds"] = more / LAYERS
    if (pipeline := runs.get("pipeline")) is not None:
        posts = [pipeline.seconds[kind] for kind in _MESSAGES if kind in pipeline.seconds]
        found["message_seconds"] = sum(posts) / len(posts)
        found["exchange_seconds"] = pipeline.around - data.around
        if not pipeline.first_stage:
            # Half of the layers, and the head on stand-ins.
            skipped = pipeline.seconds[ActionKind.FORWARD] - plain[0] / 2 - action
            found["stand_in_seconds"] = skipped / HEAD_OPERATORS
    if (split_backward := runs.get("split backward")) is not None:
        halves = sum(split_backward.seconds[kind] for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT))
        more = halves - runs["pipeline"].seconds[ActionKind.BACKWARD]
        found["deferred_operator_seconds"] = more / (LAYERS / 2 * BLOCK_BACKWARD_OPERATORS)
    if (tensor := runs.get("tensor")) is not None:
        # Each block's output is summed in forward, and the gradient of its input in backward.
        exchanged = 2 * LAYERS * _collective(profile, "all_reduce", 4 * LENGTH * WIDTH)
        more = _computing(tensor) - sum(plain) / 2 - 2 * action - exchanged
        found["split_operator_seconds"] = more / (1 + SPLIT_BACKWARD) / (LAYERS * BLOCK_OPERATORS)
    if (shards := runs.get("shards")) is not None:
        more = _computing(shards) - _computing(data)
        found["unit_seconds"] = more / UNIT_MOVES - 2 * _collective(profile, "broadcast", 4 * WIDTH * WIDTH)
    return StepOverheads(**{name: max(0.0, seconds) for name, seconds in found.items()})


def _computing(run: _Run) -> float:
    return run.seconds[ActionKind.FORWARD] + run.seconds[ActionKind.BACKWARD]


def _collective(profile: HardwareProfile, operation: str, payload_bytes: int) -> float:
    return float(collective_seconds(profile, operation, 2, 1, float(payload_bytes)))


def _same(found: StepOverheads) -> StepOverheads:
    """The median over the ranks of what each has measured; zeros are of ranks that did not measure a thing."""
    every = of_all_ranks(asdict(found))
    known = {name: [item[name] for item in every if item[name] > 0] for name in every[0]}
    return StepOverheads(**{name: median(values) if values else 0.0 for name, values in known.items()})
