"""Measuring this machine: by processes that the command starts itself, or by those that a launcher started."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_mist.errors import MistError, ProfileError

if TYPE_CHECKING:
    import torch

    from lightning_mist.hardware import Cluster, HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """This machine as it was measured.

    Attributes:
        kept: The file that later runs find it in.
        seconds: How long it took, the start of processes not counted.
    """

    cluster: "Cluster"
    profile: "HardwareProfile"
    kept: Path
    seconds: float


def local_cluster(kind: str, processes: int | None, said: str) -> "Cluster":
    """This machine, with so many processes, one for each device.

    Args:
        processes: How many; by default one for each CUDA device, on a CPU one.
        said: What the user wrote, for errors.

    Raises:
        ValueError: If there are not as many devices.
    """
    import torch

    from lightning_mist.hardware import detect

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto":
        kind = "cuda" if there else "cpu"
    if kind == "cuda" and not there:
        raise ValueError(f"{said}: this machine has no CUDA device; measure where there is one, or use a CPU")
    if kind == "cuda" and processes is not None and processes > there:
        raise ValueError(f"{said}: this machine has {there} CUDA devices; use {there}")
    return detect(processes or there or 1 if kind == "cuda" else processes or 1, 1, kind)


def measure_local(cluster: "Cluster", precision: str, *, is_fresh: bool = False) -> Measured:
    """What a fit on this machine would measure, by as many processes as it has devices.

    Raises:
        ProfileError: If measuring fails.
    """
    from torch.multiprocessing.spawn import ProcessException, spawn

    with tempfile.TemporaryDirectory() as directory:
        arguments = (cluster, precision, directory, is_fresh)
        try:
            spawn(_measure_one, args=arguments, nprocs=cluster.world_size)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            said = Path(directory, "error")
            if not said.exists():
                raise
            raise ProfileError(said.read_text(encoding="utf-8")) from error
        return _read(Path(directory))


def _measure_one(rank: int, cluster: "Cluster", precision: str, directory: str, is_fresh: bool) -> None:
    """One of the processes."""
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        # As Lightning's launchers share out the cores; what is measured depends on it.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // cluster.world_size))
    device = _device(cluster, rank)
    dist.init_process_group(
        _backend(cluster),
        init_method=Path(directory, "store").as_uri(),
        rank=rank,
        world_size=cluster.world_size,
    )
    try:
        found = measure_here(cluster, device, precision, is_fresh=is_fresh)
    except (MistError, ValueError, OSError) as error:
        Path(directory, "error").write_text(str(error), encoding="utf-8")
        raise
    if rank == 0:
        _write(found, Path(directory))
    dist.destroy_process_group()


def measure_here(cluster: "Cluster", device: "torch.device", precision: str, *, is_fresh: bool) -> Measured:
    """Measure as one of the processes of a running process group; the same on every rank, but for the seconds."""
    import torch.distributed as dist

    from lightning_mist.hardware.profile import profile_path
    from lightning_mist.strategy.planning import default_directory, machine_profile
    from lightning_mist.strategy.progress import Progress

    began = perf_counter()
    directory = default_directory()
    with Progress(enabled=dist.get_rank() == 0) as progress:
        profile = machine_profile(cluster, device, precision, directory, progress, is_fresh=is_fresh)
    seconds = perf_counter() - began
    return Measured(cluster=cluster, profile=profile, kept=profile_path(directory, cluster), seconds=seconds)


def measure_launched(kind: str, precision: str) -> Measured | None:
    """Measure as one of the processes that torchrun started; None on all but the first.

    Raises:
        ValueError: If there is no such device for this process.
    """
    import torch.distributed as dist

    from lightning_mist.hardware import detect

    world, local_world, local_rank = (
        int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    )
    node = local_cluster(kind, local_world, f"{local_world} processes on this node")
    device = _device(node, local_rank)
    dist.init_process_group(_backend(node))
    try:
        found = measure_here(detect(world, world // local_world, node.device.kind), device, precision, is_fresh=True)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def _device(cluster: "Cluster", local_rank: int) -> "torch.device":
    """The device of a process, chosen for it."""
    import torch

    if cluster.device.kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(cluster: "Cluster") -> str:
    return "nccl" if cluster.device.kind == "cuda" else "gloo"


def _write(found: Measured, directory: Path) -> None:
    """Leave what was measured for the process that started this one."""
    from lightning_mist.hardware import write_profile

    write_profile(found.profile, directory / "profile.json", cluster=found.cluster)
    said = {"kept": str(found.kept), "seconds": found.seconds}
    (directory / "said.json").write_text(json.dumps(said), encoding="utf-8")


def _read(directory: Path) -> Measured:
    from lightning_mist.hardware import read_machine

    cluster, profile = read_machine(directory / "profile.json")
    said = json.loads((directory / "said.json").read_text(encoding="utf-8"))
    return Measured(cluster=cluster, profile=profile, kept=Path(said["kept"]), seconds=said["seconds"])
