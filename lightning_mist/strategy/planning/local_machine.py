"""The machine at hand: its devices, and its profile, from the cache or measured by all ranks together."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from lightning_mist.devices import ops_of
from lightning_mist.errors import PlanError
from lightning_mist.hardware import (
    AnyCluster,
    Cluster,
    HardwareProfile,
    cluster_of,
    detect,
    load_profile,
    measure_profile,
    measuring_groups,
    parse_cluster,
    save_profile,
)
from lightning_mist.runtime.host_memory import HostPool, let_go
from lightning_mist.strategy.all_ranks import of_all_ranks, on_rank_zero
from lightning_mist.strategy.planning.overhead_measurement import measure_overheads
from lightning_mist.strategy.progress import Progress

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
"""Element type of matrix products by the first part of Lightning's precision names; all others compute in float32."""


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
    """The cluster at hand, or the one to plan for; every rank must ask.

    Args:
        wanted: What the user asked for; by default the devices of all ranks.

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
    """Raise unless ranks fill node after node.

    Args:
        nodes: The node of every rank.
        num_nodes: How many there are to be.
    """
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
    """What was measured of this machine, on every rank: the kept profile, or a new one.

    Args:
        precision: Lightning's name of the precision.
        is_fresh: Whether to measure even if there is a kept one.
    """
    dtypes = [torch.float32]
    reduced = _DTYPES.get(precision.partition("-")[0])
    if reduced is not None:
        dtypes.append(reduced)
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
