"""``lightning-mist profile``: measure this machine, show what was measured, keep it."""

import json as json_format
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_mist.cli.output import answer, display, say
from lightning_mist.units import format_seconds

if TYPE_CHECKING:
    from lightning_mist.cli.cluster_input import MeasuredMachine

Accelerator = Literal["auto", "cpu", "cuda"]


def profile(
    *,
    out: str | None = None,
    devices: int | None = None,
    precision: str = "32-true",
    accelerator: Accelerator = "auto",
    json: bool = False,
) -> None:
    """Measure this machine: computation, memory, communication, copies.

    Under torchrun (torchrun ... -m lightning_mist.cli profile) its processes measure together; otherwise the command
    starts one process for each device.

    Args:
        out: Where to write what was measured, for plan --cluster; it is kept for later runs on this machine anyway.
        devices: How many devices measure together; by default every CUDA device, or two processes on a CPU.
        precision: Lightning's name of the precision to measure besides float32, such as bf16-mixed.
        accelerator: What to measure, of auto, cpu and cuda.
        json: Print JSON on stdout and nothing else there.
    """
    found = _measure(devices, precision, accelerator)
    if found is None:
        return
    if out is not None:
        from lightning_mist.hardware import write_profile

        write_profile(found.profile, Path(out), cluster=found.cluster)
    if json:
        document = {**asdict(found), "kept": str(found.kept)}
        answer(json_format.dumps(document, indent=1))
        return
    from lightning_mist.hardware.profile_tables import render_profile

    display(render_profile, found.cluster, found.profile)
    answer(f"measured in {format_seconds(found.seconds)}; kept for later runs in {found.kept}")
    if out is not None:
        answer(f"profile written to {out}; use it with lightning-mist plan --cluster {out}")


def _measure(devices: int | None, precision: str, accelerator: Accelerator) -> "MeasuredMachine | None":
    """What was measured; None on all processes of a launcher but the first."""
    from torch.distributed import is_torchelastic_launched

    from lightning_mist.cli.cluster_input import local_cluster, measure_launched, measure_local
    from lightning_mist.model.sources import precision_context

    precision_context(precision)  # refuses one that is not known before anything is measured
    said = f"accelerator {accelerator!r}" if devices is None else f"devices = {devices}, accelerator {accelerator!r}"
    if devices is not None and devices < 1:
        raise ValueError(f"{said}: at least one device measures; use 1")
    if is_torchelastic_launched():
        if devices is not None:
            raise ValueError(f"{said}: under torchrun its processes measure; leave --devices out")
        return measure_launched(accelerator, precision)
    cluster = local_cluster(accelerator, devices, said)
    if devices is None and cluster.device.kind == "cpu":
        cluster = local_cluster("cpu", 2, said)
    cores = len(os.sched_getaffinity(0))
    if cluster.device.kind == "cpu" and cluster.world_size > cores:
        say(f"{cluster.world_size} processes share {cores} cores: they are measured as they compete")
    return measure_local(cluster, precision, is_fresh=True)
