"""The machine at hand: its devices, and its profile, from the cache or measured by all ranks together."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_mist.devices import ops_of
from lightning_mist.errors import PlanError
from lightning_mist.hardware import (
    AnyCluster,
    Cluster,
    HardwareProfile,
    StepOverheads,
    cluster_of,
    detect,
    load_profile,
    measure_profile,
    measuring_groups,
    parse_cluster,
    save_profile,
)
from lightning_mist.model import derive_splits, map_module
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.grid import plan_of
from lightning_mist.runtime.host_memory import HostPool, let_go
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.strategy.ranks import Progress, of_all_ranks, on_rank_zero
from lightning_mist.strategy.training import Engine, connected

MACHINE_SECONDS = 9.0
"""What measuring the machine may take. The runtime itself takes up to 6 s more on two CPU processes, and the layers
5 s, so that everything that a first fit measures takes 20 s."""

_FILE_BYTES, _FILE_SAMPLES = 2**25, 3
"""Of a file whose copies are timed: more than caches hold, and a few hundredths of a second each."""

_PROBE_BYTES, _PROBES = 2**20, 3
"""A sum that tells how fast links are: half a second in all at 100 Mbit/s, nothing beside planning at 10 Gbit/s."""

MACHINE_PART = 0.7
"""The part of measuring, in time, that is the machine's and not the runtime's."""


def cluster_for(wanted: str | AnyCluster | None, strategy: Any) -> AnyCluster:
    """The cluster at hand, or the one that the user asked for; every rank must ask.

    Raises:
        PlanError: If ranks that are taken to be on one node are not.
        ValueError: If it has not as many devices as processes run.
    """
    _check_nodes(of_all_ranks(strategy.node_rank), strategy.num_nodes)
    if wanted is None:
        return joined(of_all_ranks(detect(strategy.world_size, strategy.num_nodes, strategy.root_device.type)))
    cluster = parse_cluster(wanted) if isinstance(wanted, str) else wanted
    if cluster.world_size != strategy.world_size:
        raise ValueError(
            f"cluster={wanted!r} has {cluster.world_size} devices, but {strategy.world_size} processes run: plan "
            "for the cluster at hand, or use `lightning-mist plan` for another"
        )
    return cluster


def _check_nodes(nodes: Sequence[int], num_nodes: int) -> None:
    """Raise unless ranks, of which these are the nodes, fill so many node after node."""
    per_node = max(1, len(nodes) // num_nodes)
    for rank, node in enumerate(nodes):
        first = rank - rank % per_node
        if node != nodes[first]:
            raise PlanError(
                f"ranks {first} and {rank} are on nodes {nodes[first]} and {node}: {per_node} ranks in a row must be "
                "on one; set num_nodes of the Trainer, and start processes node by node (srun "
                "--distribution=block, mpirun --map-by slot)"
            )


def default_directory() -> Path:
    """Where profiles are kept unless the user says otherwise."""
    return Path.home() / ".cache" / "lightning-mist"


def machine_profile(
    cluster: Cluster,
    device: torch.device,
    precision: str,
    directory: Path,
    progress: Progress,
    *,
    is_fresh: bool = False,
) -> HardwareProfile:
    """What was measured of this machine, on every rank: the kept profile, if it is not to be fresh, or a new one."""
    from lightning_mist.cost.time import compute_dtype

    dtypes = list(dict.fromkeys((torch.float32, getattr(torch, compute_dtype(precision)))))
    kept, dtypes = on_rank_zero(lambda: (None, dtypes) if is_fresh else _kept(directory, cluster, dtypes, progress))
    if kept is not None:
        progress.say(f"using what was {kept.source}")
        return kept
    progress.tell("measuring this machine (once; kept for later runs)")
    with measuring_groups(cluster) as groups:
        profile = measure_profile(
            cluster=cluster,
            device=device,
            dtypes=dtypes,
            groups=groups,
            progress=lambda text, fraction: progress.update(text, MACHINE_PART * fraction),
            budget_seconds=MACHINE_SECONDS,
        )
    progress.update("the runtime itself", MACHINE_PART)
    profile = replace(profile, overheads=measure_overheads(profile, device, cluster.world_size))
    progress.update("the runtime itself", 1.0)
    if dist.get_rank() == 0:
        _keep(profile, directory, cluster, progress, is_fresh=is_fresh)
    return profile


def guessed_reduction(cluster: Cluster, device: torch.device, directory: Path) -> float:
    """Seconds in which all ranks sum up a byte of what each has, roughly; 0 if that need not be found out.

    Data sheets say how fast a device and the links in its node are. What is between nodes, and not measured yet, may be
    a thousand times slower than what is common. Every rank asks, and gets the same answer.
    """
    if cluster.num_nodes == 1 or on_rank_zero(lambda: load_profile(directory, cluster)[0] is not None):
        return 0.0
    seconds, values, ops = [], torch.zeros(_PROBE_BYTES // 4, device=device), ops_of(device)
    for _ in range(_PROBES):
        dist.barrier()
        began = perf_counter()
        dist.all_reduce(values)
        ops.synchronize()
        seconds.append(perf_counter() - began)
    return max(of_all_ranks(min(seconds))) / _PROBE_BYTES


def with_files(profile: HardwareProfile, directory: Path, device: torch.device) -> HardwareProfile:
    """A profile that knows how fast memory is copied from and to files in a folder; all ranks copy at once.

    They are copied as what is offloaded is: the kernel keeps in memory what it has room for, and writes behind. State
    that is larger than the memory which is free for that is as slow as the disk.
    """
    file, memory = (
        HostPool(ops_of(device), directory=directory).take_bytes(_FILE_BYTES),
        torch.ones(_FILE_BYTES, dtype=torch.uint8),
    )
    file.zero_()
    seconds: list[list[float]] = [[], []]
    for _ in range(_FILE_SAMPLES):
        for direction, (source, target) in enumerate(((file, memory), (memory, file))):
            dist.barrier()
            began = perf_counter()
            target.copy_(source)
            let_go(file)
            seconds[direction].append(perf_counter() - began)
    there, back = (_FILE_BYTES / max(of_all_ranks(median(item))) for item in seconds)
    return replace(profile, host_to_device_bytes_per_second=there, device_to_host_bytes_per_second=back)


def _kept(
    directory: Path, cluster: Cluster, dtypes: list[torch.dtype], progress: Progress
) -> tuple[HardwareProfile | None, list[torch.dtype]]:
    """The kept profile if it has these rates, and else the rates to measure: those that it has are not given up."""
    found, warning = load_profile(directory, cluster, dtypes)
    if warning is not None:
        progress.say(warning)
    return found, dtypes if found is not None else rates_to_measure(directory, cluster, dtypes)


def rates_to_measure(directory: Path, cluster: Cluster, dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """These element types, and those of which a kept profile has rates."""
    other, _ = load_profile(directory, cluster)
    known = [] if other is None else [getattr(torch, rate.dtype, None) for rate in other.compute]
    return dtypes + [dtype for dtype in known if isinstance(dtype, torch.dtype) and dtype not in dtypes]


def _keep(profile: HardwareProfile, directory: Path, cluster: Cluster, progress: Progress, *, is_fresh: bool) -> None:
    """Keep a profile for later runs; training goes on without."""
    try:
        save_profile(profile, directory, cluster)
    except OSError as error:
        if is_fresh:
            raise  # keeping it was the point
        progress.say(f"what was measured is not kept for later runs: {error}")


def joined(found: Sequence[Cluster]) -> AnyCluster:
    """The cluster of ranks of which each takes it for one of devices like its own.

    Of devices of one name the least memory counts, and of their hosts.
    """
    parts = []
    for _, alike_in_a_row in groupby(found, key=lambda cluster: cluster.device.name):
        run = list(alike_in_a_row)
        first = run[0]
        per_node = min(len(run), first.devices_per_node)
        per_node = per_node if len(run) % per_node == 0 else 1
        device = replace(first.device, memory_bytes=min(cluster.device.memory_bytes for cluster in run))
        parts.append(
            replace(
                first,
                num_nodes=len(run) // per_node,
                devices_per_node=per_node,
                device=device,
                host_memory_bytes=_host_memory(run, per_node),
            )
        )
    return cluster_of(parts)


def _host_memory(run: Sequence[Cluster], per_node: int) -> int | None:
    """The least host memory that so many devices of a node have; those of other parts have an equal share of it."""
    known = [item.host_memory_bytes * per_node // item.devices_per_node for item in run if item.host_memory_bytes]
    return min(known, default=None)


def alike(cluster: AnyCluster) -> Cluster:
    """The cluster, if its devices are alike, as what is measured here supposes.

    Raises:
        PlanError: If they are not, with a way to plan for them.
    """
    if isinstance(cluster, Cluster):
        return cluster
    ends = zip(cluster.offsets, cluster.parts, strict=True)
    where = "; ".join(f"ranks {first} to {first + part.world_size - 1} on {part.device.name}" for first, part in ends)
    raise PlanError(
        f"unlike devices: {where}. What is measured for a plan here is measured of one kind of device: make the plan "
        f"with `lightning-mist plan --cluster {cluster.text} --out plan.json` and train with plan='plan.json'"
    )


# What the runtime itself takes ------------------------------------------------------------------------------------

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
    """Measure what the runtime's own Python takes, on all ranks at once; every rank calls this and gets the same.

    The very engine that trains runs a few batches of a tiny network, under plans that each have one thing more than
    another, and its recorder tells how long every action took without waiting for other ranks. What the network itself
    takes, measured without the engine, is taken off.

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
        plans: dict[str, dict[str, Any]] = {"data": {"zero_stage": 1}}
        plans["recomputed"] = {"zero_stage": 1, "checkpointed_layers": "all"}
        if world_size % 2 == 0:
            plans |= {"pipeline": {"pipeline_stages": 2}, "split backward": {"pipeline_stages": 2, "schedule": "zb-h1"}}
            found = derive_splits(module, module.training_step, batch, found, (2,))
            plans |= {"tensor": {"tensor_parallel_degree": 2}} if found.splits else {}
        if world_size > 1:
            plans["shards"] = {"zero_stage": 3}
        runs = {name: _run(module, found, batch, device, _plan(world_size, **more)) for name, more in plans.items()}
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
    engine = Engine(module, plan, found, connected(plan, found, device), device=device)
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
        for record in records:
            if isinstance(record.action, Action):
                kinds.setdefault(record.action.kind, []).append(record.seconds - record.waited_seconds)
    engine.fill()
    engine.transport.close()
    return _Run(
        first_stage=plan.stage_of(dist.get_rank()) == 0,
        around=median(around),
        seconds={kind: median(values) for kind, values in kinds.items()},
    )


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
        from lightning_mist.cost.time import SPLIT_BACKWARD

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
    from lightning_mist.cost.time import collective_seconds

    return float(collective_seconds(profile, operation, 2, 1, float(payload_bytes)))


def _same(found: StepOverheads) -> StepOverheads:
    """The median over the ranks of what each has measured; zeros are of ranks that did not measure a thing."""
    every = of_all_ranks(asdict(found))
    known = {name: [item[name] for item in every if item[name] > 0] for name in every[0]}
    return StepOverheads(**{name: median(values) if values else 0.0 for name, values in known.items()})
