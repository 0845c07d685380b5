"""The machine that a command is for: described, in a file that ``profile`` wrote, or this one, measured."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_mist.hardware import AnyCluster, HardwareProfile
    from lightning_mist.plan import Plan

_LOCAL = "local"


def is_local(text: str) -> bool:
    """Whether a text names this machine."""
    return text.partition(":")[0] == _LOCAL


def is_measured(text: str) -> bool:
    """Whether a text names a file that ``lightning-mist profile`` wrote."""
    return text.lower().endswith(".json")


def open_cluster(text: str) -> "AnyCluster":
    """The cluster that a text describes, or this machine."""
    from lightning_mist.hardware import parse_cluster, read_machine

    if is_measured(text):
        return read_machine(Path(text))[0]
    if not is_local(text):
        return parse_cluster(text)
    count = text.partition(":")[2]
    if text != _LOCAL and not (count.isdecimal() and int(count) > 0):
        raise ValueError(f"cluster {text!r}: write local, or local: and a number of processes, for example local:2")
    from lightning_mist.cli.measuring import local_cluster

    return local_cluster("auto", int(count) if count else None, f"cluster {text!r}")


def open_profile(text: str, cluster: "AnyCluster", precision: str) -> "HardwareProfile | None":
    """What was measured of the machine that a text names: in a file, or of this one; None if it is only described.

    Args:
        text: As for :func:`open_cluster`.
    """
    if is_measured(text):
        from lightning_mist.hardware import read_machine

        return read_machine(Path(text))[1]
    if not is_local(text):
        return None
    from lightning_mist.cli.measuring import measure_local
    from lightning_mist.hardware import single

    return measure_local(single(cluster, "measuring"), precision).profile


def devices_of(plan: "Plan", cluster: "AnyCluster") -> tuple[str, ...]:
    """What the devices of every stage of a plan are, for people; nothing if they are all alike."""
    if len(cluster.parts) == 1:
        return ()
    found = [sorted({cluster.part_of(device) for device in stage.devices}) for stage in plan.stages]
    return tuple(" and ".join(cluster.parts[part].device.name for part in parts) for parts in found)


def oldest_capability(cluster: "AnyCluster") -> tuple[int, int] | None:
    """The compute capability that all devices have; None where it is not known of one."""
    from lightning_mist.hardware.capability import capability_of

    known = [capability_of(part.device.name) for part in cluster.parts]
    return None if None in known else min(item for item in known if item is not None)


def precision_notes(cluster: "AnyCluster", precision: str) -> tuple[str, ...]:
    """What another precision would do for a machine that computes in single precision, if its data sheet says so.

    Args:
        precision: Lightning's name of the precision that was asked for, or taken by default.
    """
    from lightning_mist.errors import ProfileError
    from lightning_mist.hardware.catalog import find_device

    names = tuple(dict.fromkeys(part.device.name for part in cluster.parts))
    if precision != "32-true" or cluster.kind != "cuda":
        return ()
    try:
        rates = [dict(find_device(name).peak_flops) for name in names]
    except ProfileError:
        return ()
    other = "bfloat16" if all("bfloat16" in rate for rate in rates) else "float16"
    if not all(other in rate for rate in rates):
        return ()
    gains = " and ".join(
        f"{rate[other] / rate['float32']:.1f} times as fast on {name}" for name, rate in zip(names, rates, strict=True)
    )
    asking = "bf16-mixed" if other == "bfloat16" else "16-mixed"
    return (
        f"the plan computes in single precision, Lightning's default; under --precision {asking} devices multiply "
        f"matrices up to {gains}, by their data sheets",
    )
