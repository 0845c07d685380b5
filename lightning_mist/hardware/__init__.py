"""What the machine is: detected, described or from the catalog, and what was measured of it.

What measures it needs torch, and is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

from lightning_mist.hardware.catalog import catalog_profile, host_memory
from lightning_mist.hardware.cluster import (
    AnyCluster,
    Cluster,
    Device,
    HostLink,
    Link,
    MixedCluster,
    cluster_of,
    single,
)
from lightning_mist.hardware.describe import parse_cluster
from lightning_mist.hardware.detection import detect
from lightning_mist.hardware.groups import measuring_groups
from lightning_mist.hardware.host_share import USABLE_HOST_MEMORY, usable_host_bytes, with_host_memory
from lightning_mist.hardware.profile import (
    CollectiveCost,
    ComputeRate,
    Correction,
    CorrectionStore,
    HardwareProfile,
    Interference,
    KernelRate,
    MemoryRate,
    Observation,
    StepOverheads,
    Term,
    corrected,
    correction_store,
    factor_of,
    learn,
    load_corrections,
    load_profile,
    read_machine,
    read_profile,
    save_corrections,
    save_profile,
    write_profile,
)

if TYPE_CHECKING:
    from lightning_mist.hardware.measure import measure_profile


def __getattr__(name: str) -> Any:
    if name == "measure_profile":
        from lightning_mist.hardware.measure import measure_profile

        return measure_profile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
