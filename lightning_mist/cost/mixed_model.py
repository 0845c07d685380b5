"""What stages cost on clusters of unlike devices: one model for every part.

A stage of a pipeline lies within one part, whose model prices it; what crosses to another part goes over the link
between them (:mod:`lightning_mist.cost.time.communication`). The only stage of a plan has the devices of all parts.
They share its rows evenly and wait for each other, so each of its terms is that of the part where it takes longest.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import FloatArray, Placed, StageCandidates, StageSlot
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.stage_model import PlanCosts, StageCostModel, Variant
from lightning_mist.cost.time import RegionSeconds, StageSeconds
from lightning_mist.errors import ProfileError
from lightning_mist.hardware import (
    AnyCluster,
    Cluster,
    CollectiveCost,
    HardwareProfile,
    Link,
    MixedCluster,
    catalog_profile,
)
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import AS_IT_IS, StageMethod

Profiles: TypeAlias = HardwareProfile | Sequence[HardwareProfile] | None
"""How fast a machine is: of a cluster of unlike devices one profile for every part; ``None`` for the catalog's."""


class MixedCostModel(PlanCosts):
    """Seconds and bytes of stages of one network on unlike devices; keeps what it has computed.

    Raises:
        ProfileError: If there are not as many profiles as parts, a device is not in the catalog, or the network's
            layers were measured, which would be on one kind of device.
    """

    def __init__(self, spec: ModelSpec, profiles: Profiles, cluster: MixedCluster) -> None:
        if spec.seconds or spec.optimizer.step_seconds_per_parameter_byte > 0:
            raise ProfileError(
                f"{spec.name} with measured seconds on {cluster.text}: they were measured on one kind of device; trace "
                "it without measuring, so that they follow from the profile of every part"
            )
        super().__init__()
        self.spec, self.cluster = spec, cluster
        given = _of_every_part(profiles, cluster)
        own = tuple(
            _catalogued(part) if profile is None else profile
            for part, profile in zip(cluster.parts, given, strict=True)
        )
        memories: dict[Variant, MemoryModel] = {}
        seams = [_outside(part, profile, cluster) for part, profile in zip(cluster.parts, given, strict=True)]
        ends = [(found, part.devices_per_node) for found, part in seams]
        self.parts = tuple(
            StageCostModel(spec, profile, part, seams=ends, memories=memories)
            for part, profile in zip(cluster.parts, own, strict=True)
        )
        self._together = tuple(StageCostModel(spec, profile, whole, memories=memories) for profile, whole in seams)

    def with_memory(self, cluster: MixedCluster) -> "MixedCostModel":
        """The same on a cluster that differs in the memory of its devices alone; shares what has been computed."""
        found = copy(self)
        found.cluster = cluster
        found.parts = tuple(own.with_memory(part) for own, part in zip(self.parts, cluster.parts, strict=True))
        return found

    def memory(self, slot: StageSlot) -> MemoryModel:
        """What stages of a slot's tensor-parallel degree hold."""
        return self.parts[0].memory(slot)

    @property
    def whole(self) -> MemoryModel:
        """What the network holds and does where nothing is split."""
        return self.parts[0].whole

    def models(self, slot: StageSlot) -> tuple[StageCostModel, ...]:
        """The models of the devices that run a slot: one, or those of all parts."""
        return (self.parts[slot.part],) if slot.parts else self._together

    def region_seconds(
        self, rows: float, degree: int = 1, sequence: bool = False, method: StageMethod = AS_IT_IS
    ) -> RegionSeconds:
        """Seconds of every region where it takes longest, at a number of rows; as of a :class:`StageCostModel`."""
        found = [model.region_seconds(rows, degree, sequence, method) for model in self._together]
        order = ("rates", "extrapolated", "measured")
        return RegionSeconds(
            forward_R=np.maximum.reduce([item.forward_R for item in found]),
            backward_R=np.maximum.reduce([item.backward_R for item in found]),
            recompute_R=np.maximum.reduce([item.recompute_R for item in found]),
            source=min((item.source for item in found), key=order.index),
        )

    def seconds_of(self, items: Sequence[Placed]) -> tuple[StageSeconds, ...]:
        """Seconds of the candidates of several slots but for exchange, asked of every part's model together."""
        of_models: dict[int, list[int]] = {}
        for index, (slot, _) in enumerate(items):
            for model in self.models(slot):
                of_models.setdefault(id(model), []).append(index)
        found: dict[int, list[StageSeconds]] = {index: [] for index in range(len(items))}
        for model in (*self.parts, *self._together):
            asked = of_models.get(id(model), ())
            for index, seconds in zip(asked, model.seconds_of([items[index] for index in asked]), strict=True):
                found[index].append(seconds)
        return tuple(_longest(found[index]) for index in range(len(items)))

    def exchanged(self, slot: StageSlot, candidates: StageCandidates) -> tuple[FloatArray, ...]:
        """Seconds of what candidates exchange with other stages."""
        found = [model.exchanged(slot, candidates) for model in self.models(slot)]
        return tuple(np.maximum.reduce(items) for items in zip(*found, strict=True))


def _longest(items: Sequence[StageSeconds]) -> StageSeconds:
    """Every term where it is longest."""
    if len(items) == 1:
        return items[0]
    names = [field.name for field in fields(StageSeconds)]
    return StageSeconds(**{name: np.maximum.reduce([getattr(item, name) for item in items]) for name in names})


CostModel: TypeAlias = StageCostModel | MixedCostModel
"""Prices the stages of plans for one cluster."""


def cost_model(spec: ModelSpec, profiles: Profiles, cluster: AnyCluster) -> CostModel:
    """The cost model of a network on a machine.

    Raises:
        ProfileError: If there are not as many profiles as parts, or a device is not in the catalog.
    """
    if isinstance(cluster, MixedCluster):
        return MixedCostModel(spec, profiles, cluster)
    (profile,) = _of_every_part(profiles, cluster)
    return StageCostModel(spec, profile or catalog_profile(cluster), cluster)


def models_of(model: CostModel, devices: Iterable[int]) -> tuple[StageCostModel, ...]:
    """The models of the parts in which some devices lie."""
    return tuple(model.parts[part] for part in sorted({model.cluster.part_of(device) for device in devices}))


def profiles_of(model: CostModel) -> tuple[HardwareProfile, ...]:
    """How fast the devices of every part are."""
    return tuple(part.profile for part in model.parts)


def _of_every_part(profiles: Profiles, cluster: AnyCluster) -> tuple[HardwareProfile | None, ...]:
    if profiles is None:
        return (None,) * len(cluster.parts)
    given = (profiles,) if isinstance(profiles, HardwareProfile) else tuple(profiles)
    if len(given) != len(cluster.parts):
        raise ProfileError(
            f"{len(given)} profile{'s' if len(given) > 1 else ''} ({', '.join(item.device for item in given)}) for the "
            f"{len(cluster.parts)} parts of {cluster.text}: a profile is of one kind of device; give one for every "
            "part, or none for the catalog's"
        )
    return given


def _catalogued(part: Cluster) -> HardwareProfile:
    """The catalog's profile of a part, with what its devices do between nodes even if it has one."""
    return catalog_profile(replace(part, num_nodes=max(2, part.num_nodes)))


def _outside(part: Cluster, profile: HardwareProfile | None, cluster: MixedCluster) -> tuple[HardwareProfile, Cluster]:
    """A part as seen from others: what its devices do with nodes beyond it, in a cluster of nothing but its kind."""
    if profile is not None and profile.source.startswith("catalog") and profile == _catalogued(part):
        profile = None  # It is about the part alone; the catalog knows more.
    nodes = max(2, -(-cluster.world_size // part.devices_per_node))
    whole = replace(part, num_nodes=nodes, inter_node=cluster.link or part.inter_node)
    if profile is None:
        return catalog_profile(whole), whole
    if cluster.link is None:
        return profile, whole
    inside = tuple(item for item in profile.collectives if item.num_nodes == 1)
    known = {item.operation for item in profile.collectives}
    between = tuple(_over(cluster.link, part, operation) for operation in sorted(known))
    return replace(profile, collectives=(*inside, *between)), whole


def _over(link: Link, part: Cluster, operation: str) -> CollectiveCost:
    """A pair of devices in different nodes, all devices of the node communicating over the link."""
    return CollectiveCost(
        operation=operation,
        group_size=2,
        num_nodes=2,
        latency_seconds=link.latency_seconds,
        bytes_per_second=link.bytes_per_second / part.devices_per_node,
        spread=0.0,
    )
