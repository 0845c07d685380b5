"""The machine that a command is for: described, in a file that ``profile`` wrote, or this one, measured.

It is measured by processes that the command starts itself, or by those that a launcher started.
"""

import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from lightning_mist.errors import MistError, ProfileError

if TYPE_CHECKING:
    import torch

    from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
    from lightning_mist.plan import Plan

_LOCAL = "local"

MOST_PROCESSES_PER_CORE = 8
"""More would only wait for each other, and take the memory of as many Pythons with torch."""


def is_local(text: str) -> bool:
    """Whether a text names this machine."""
    return text.partition(":")[0] == _LOCAL


def open_cluster(text: str) -> "tuple[AnyCluster, HardwareProfile | None]":
    """The cluster that a text describes, or this machine; and what a file says was measured of it."""
    from lightning_mist.hardware import parse_cluster, read_machine

    if text.lower().endswith(".json"):
        return read_machine(Path(text))
    if not is_local(text):
        return parse_cluster(text), None
    count = text.partition(":")[2]
    if text != _LOCAL and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"cluster {text!r}: write local, or local: and a number of processes, for example local:2")
    return local_cluster("auto", int(count) if count else None, f"cluster {text!r}"), None


def check_rates(cluster: "AnyCluster", measured: "HardwareProfile | None", precision: str) -> None:
    """Refuse a precision in which a described device has no rate, before the network is looked at: that takes time.

    Raises:
        ProfileError: If what was measured, or else the catalog, has no rate for it.
    """
    from lightning_mist.cost.time import compute_dtype, compute_rate
    from lightning_mist.hardware import catalog_profile
    from lightning_mist.model.presets import check_precision

    check_precision(precision)
    for part in cluster.parts:
        compute_rate(measured or catalog_profile(part), compute_dtype(precision), 1.0)


def in_stack(profile: "HardwareProfile | None", cluster: "AnyCluster", stack: str) -> "HardwareProfile | None":
    """A profile, or the catalog's for a described machine, under the kernels of a stack.

    Raises:
        ProfileError: If they are not known of it.
    """
    if stack == "eager":
        return profile
    from lightning_mist.hardware import catalog_profile, single
    from lightning_mist.hardware.catalog import with_stack

    one = single(cluster, f"the stack {stack}")
    return with_stack(profile or catalog_profile(one), stack)


def devices_of(plan: "Plan", cluster: "AnyCluster") -> tuple[str, ...]:
    """What the devices of every stage of a plan are, for people; nothing if they are all alike."""
    if len(cluster.parts) == 1:
        return ()
    found = [sorted({cluster.part_of(device) for device in stage.devices}) for stage in plan.stages]
    return tuple(" and ".join(cluster.parts[part].device.name for part in parts) for parts in found)


def oldest_capability(cluster: "AnyCluster") -> tuple[int, int] | None:
    """The compute capability that all devices have; None where it is not known of one."""
    from lightning_mist.hardware.catalog import capability_of

    known = [capability_of(part.device.name) for part in cluster.parts]
    return None if None in known else min(item for item in known if item is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The precision of a forecast.

    Attributes:
        name: Lightning's name of it.
        note: What to say of it in the first line; empty where it was asked for.
    """

    name: str
    master_weights: bool
    note: str = ""


def precision_of(cluster: "AnyCluster", asked: str | None, *, master_weights: bool) -> Precision:
    """The precision that was asked for, or what people train in where nothing was said.

    That is bfloat16 with masters in float32 where every device multiplies in it by its data sheet, else float32.

    Raises:
        ValueError: If master weights are asked for in a precision that has none.
    """
    from lightning_mist.model import MASTERS_PRECISION

    if asked is None and not master_weights:
        rates = _peak_rates(cluster)
        has_bf16 = bool(rates) and all("bfloat16" in rate for rate in rates.values())
        note = " (no --precision was given)"
        return Precision(name=MASTERS_PRECISION if has_bf16 else "32-true", master_weights=has_bf16, note=note)
    name = asked or MASTERS_PRECISION
    if master_weights and name != MASTERS_PRECISION:
        raise ValueError(
            f"--master-weights with --precision {name}: masters in float32 are for weights in bfloat16; use "
            f"--precision {MASTERS_PRECISION}, or leave one of both out"
        )
    return Precision(name=name, master_weights=master_weights)


def _peak_rates(cluster: "AnyCluster") -> dict[str, dict[str, float]]:
    """FLOP/s by element type of a cluster's CUDA devices, by their data sheets; empty if there is none of one."""
    from lightning_mist.hardware.catalog import find_device

    try:
        names = [part.device.name for part in cluster.parts] if cluster.kind == "cuda" else []
        return {name: dict(find_device(name).peak_flops) for name in names}
    except ProfileError:
        return {}


def precision_notes(cluster: "AnyCluster", precision: str) -> tuple[str, ...]:
    """What another precision would do for a machine that computes in single precision, if its data sheet says so."""
    rates = _peak_rates(cluster) if precision == "32-true" else {}
    other = "bfloat16" if all("bfloat16" in rate for rate in rates.values()) else "float16"
    if not rates or not all(other in rate for rate in rates.values()):
        return ()
    gains = " and ".join(f"{rate[other] / rate['float32']:.1f} times as fast on {name}" for name, rate in rates.items())
    asking = "bf16-mixed" if other == "bfloat16" else "16-mixed"
    return (
        f"the plan computes in single precision, Lightning's default; under --precision {asking} devices multiply "
        f"matrices up to {gains}, by their data sheets",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
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

    Raises:
        ValueError: If there are not as many devices, or cores for them.
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
    most = MOST_PROCESSES_PER_CORE * len(os.sched_getaffinity(0))
    if kind != "cuda" and processes is not None and processes > most:
        raise ValueError(
            f"{said}: at most {most} processes are measured on this machine, {MOST_PROCESSES_PER_CORE} for each core; "
            "use fewer, or describe the machine"
        )
    return detect(processes or there or 1 if kind == "cuda" else processes or 1, 1, kind)


def measure_local(cluster: "Cluster", precision: str, *, is_fresh: bool = False) -> MeasuredMachine:
    """What a fit on this machine would measure, by as many processes as it has devices."""
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
        found: MeasuredMachine = pickle.loads(Path(directory, "measured").read_bytes())
        return found


def _measure_one(rank: int, cluster: "Cluster", precision: str, directory: str, is_fresh: bool) -> None:
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
        Path(directory, "measured").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def measure_here(cluster: "Cluster", device: "torch.device", precision: str, *, is_fresh: bool) -> MeasuredMachine:
    """Measure as one of the processes of a running process group; the same on every rank, but for the seconds."""
    import torch.distributed as dist

    from lightning_mist.hardware.profile import profile_path
    from lightning_mist.strategy.planning import default_directory, machine_profile
    from lightning_mist.strategy.ranks import Progress

    began = perf_counter()
    directory = default_directory()
    with Progress(enabled=dist.get_rank() == 0) as progress:
        profile = machine_profile(cluster, device, precision, directory, progress, is_fresh=is_fresh)
    seconds = perf_counter() - began
    return MeasuredMachine(cluster=cluster, profile=profile, kept=profile_path(directory, cluster), seconds=seconds)


def measure_launched(kind: str, precision: str) -> MeasuredMachine | None:
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
    import torch

    if cluster.device.kind != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _backend(cluster: "Cluster") -> str:
    return "nccl" if cluster.device.kind == "cuda" else "gloo"
