"""One search, from a network and a machine to a plan."""

from lightning_mist.cost import Profiles
from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.tuner.intra_stage import IntraStage
from lightning_mist.tuner.planner import Planner
from lightning_mist.tuner.result import TuneResult
from lightning_mist.tuner.space import SearchSpace, Space


def tune(
    spec: ModelSpec,
    cluster: AnyCluster,
    *,
    profile: Profiles = None,
    global_batch_size: int,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    search: SearchSpace | None = None,
) -> TuneResult:
    """The fastest plan that fits.

    Args:
        spec: The network.
        cluster: The devices.
        profile: How fast they are, one profile for every part of a cluster of unlike devices; by default from the
            catalog.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        memory_limit: Bytes of each device that may be used in all; see
            :func:`~lightning_mist.tuner.budget.usable_bytes`.
        host_memory_limit: Bytes of host memory of each node that offloading may take, of which every device may take
            an equal part; by default a share of what the hosts have, see
            :func:`~lightning_mist.tuner.budget.usable_host_bytes`.
        search: Limits of the search; by default none.

    Raises:
        InfeasibleError: If no plan fits, with the least that any needs and what binds.
        PlanError: If the batch does not come in equal parts from the devices.
        ProfileError: If the profile lacks what the cost model needs.
    """
    return Planner(spec, cluster, profile=profile).tune(
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        host_memory_limit=host_memory_limit,
        search=search,
    )


def stages_of(
    space: Space, spec: ModelSpec, cluster: Cluster, profile: HardwareProfile | None, memory_limit: int | None
) -> IntraStage:
    """What stages may be and cost; the same for a search and for what it is compared with."""
    return Planner(spec, cluster, profile=profile).stages(space, memory_limit)
