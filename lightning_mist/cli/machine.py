"""The machine that a command is for: described, or this one, measured."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_mist.hardware import Cluster, HardwareProfile

_LOCAL = "local"


def is_local(text: str) -> bool:
    """Whether a text names this machine."""
    return text.partition(":")[0] == _LOCAL


def open_cluster(text: str) -> "Cluster":
    """The cluster that a text describes, or this machine."""
    from lightning_mist.hardware import detect, parse_cluster

    if not is_local(text):
        return parse_cluster(text)
    count = text.partition(":")[2]
    if text != _LOCAL and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"cluster {text!r}: write local, or local: and a number of processes, for example local:2")
    import torch

    kind, there = ("cuda", torch.cuda.device_count()) if torch.cuda.is_available() else ("cpu", None)
    processes = int(count) if count else there or 1
    if there is not None and processes > there:
        raise ValueError(f"cluster {text!r}: this machine has {there} CUDA devices; write local:{there}")
    return detect(processes, 1, kind)


def measured_profile(cluster: "Cluster", precision: str) -> "HardwareProfile":
    """The profile that a fit on this machine would use: kept from earlier, or measured by as many processes."""
    from torch.multiprocessing.spawn import spawn

    from lightning_mist.hardware import read_profile

    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, "profile.json")
        arguments = (cluster, precision, os.path.join(directory, "store"), target)
        spawn(_measure, args=arguments, nprocs=cluster.world_size)  # type: ignore[no-untyped-call]
        return read_profile(Path(target))


def _measure(rank: int, cluster: "Cluster", precision: str, store: str, target: str) -> None:
    """One process of a measurement of this machine."""
    import torch
    import torch.distributed as dist

    from lightning_mist.hardware import write_profile
    from lightning_mist.strategy.machine import default_directory, machine_profile
    from lightning_mist.strategy.progress import Progress

    on_cuda = cluster.device.kind == "cuda"
    device = torch.device(f"cuda:{rank}" if on_cuda else "cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=cluster.world_size,
    )
    with Progress(enabled=rank == 0) as progress:
        profile = machine_profile(
            cluster=cluster, device=device, precision=precision, directory=default_directory(), progress=progress
        )
    if rank == 0:
        write_profile(profile, Path(target))
    dist.destroy_process_group()
