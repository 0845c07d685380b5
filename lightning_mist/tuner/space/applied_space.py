"""Which plans are looked at.

With a batch of ``B`` rows over all devices, ``G`` microbatches and a stage of ``n`` devices, of which each ``t`` share
every layer (tensor parallelism) and the ``d = n / t`` groups of them are data-parallel, each device of the stage
computes on ``B / (G d)`` rows per microbatch, a whole number. A part of a microbatch never mixes the batches of two
loaders (:mod:`lightning_mist.plan.rows`), so that with ``L`` of these ``G d / L`` is a whole number too: the number of
parts that this stage cuts a loader's batch into. By default every device loads, and ``L`` is their number. Where that
does not divide ``B``, plans have as many loaders as copies of the pipeline, the greatest common divisor of their ``d``,
which divides every ``G d`` by itself.

Stages that are neither first nor last and hold the same kinds of layers in the same order cost the same wherever they
lie, so each such range of layers is looked at once (:class:`LayerRanges`). If all layers are alike the start of these
stages is left open altogether.

Array axes
    K  ranges
    J  ranges with numbers of recomputed layers
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import gcd
from operator import or_
from typing import Literal

import numpy as np

from lightning_mist.cost.inputs import IntArray, parameter_regions
from lightning_mist.errors import PlanError
from lightning_mist.hardware import AnyCluster, Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import (
    AS_IT_IS,
    CheckpointingKind,
    Feature,
    ModuleMap,
    ScheduleName,
    StageMesh,
    StageMethod,
    StagePlan,
)
from lightning_mist.plan.grid import longest_chain
from lightning_mist.plan.search_space import OFFLOADED, SearchSpace
from lightning_mist.tuner.options import OPTIONS


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How the devices of a stage are arranged.

    Attributes:
        sequence: Whether tensor-parallel devices are sequence-parallel too.
        method: How they compute what they compute.
        shard: Ranks that ZeRO shards over, 0 if all with the same parameters.
    """

    data: int
    tensor: int = 1
    sequence: bool = False
    method: StageMethod = AS_IT_IS
    shard: int = 0

    @classmethod
    def of(cls, stage: StagePlan) -> "Shape":
        """That of a stage."""
        mesh = stage.mesh
        degrees = mesh.data_parallel_degree, mesh.tensor_parallel_degree
        return cls(*degrees, mesh.sequence_parallel, stage.method, mesh.shard_degree or 0)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor

    def mesh(self, devices: tuple[int, ...]) -> StageMesh:
        """These devices so arranged."""
        return StageMesh(
            devices=devices,
            data_parallel_degree=self.data,
            tensor_parallel_degree=self.tensor,
            sequence_parallel=self.sequence,
            shard_degree=self.shard or None,
        )


def shard_degrees(search: SearchSpace, data: int) -> tuple[int, ...]:
    """Over how many of some ranks ZeRO may shard, 0 for all of them."""
    if not any(search.zero_stages):
        return (0,)
    return (0, *(count for count in sorted(set(search.shard_degrees)) if count < data and data % count == 0))


def settled_loaders(search: SearchSpace, world_size: int, rows: int, uncut: Sequence[str]) -> int | None:
    """How many batches are loaded at once; None if as many as a plan has copies.

    Args:
        rows: Rows of a batch over all devices.
        uncut: Why batches may not be cut.

    Raises:
        PlanError: If a batch does not come in equal parts from the loaders.
    """
    asked = search.data_parallel_size
    if asked is not None and world_size % asked:
        raise PlanError(
            f"data_parallel_size = {asked} on {world_size} devices: equal groups of devices load the same samples, so "
            f"it must divide {world_size}"
        )
    if rows < 1 or (asked is not None and rows % asked):
        loaders = asked or 1
        raise PlanError(
            f"global_batch_size = {rows} with data_parallel_size = {loaders}: all loaders bring as many rows, so it "
            f"must be a multiple of {loaders}; use {max(1, round(rows / loaders)) * loaders}"
        )
    if asked is not None or rows % world_size == 0:
        return asked or world_size
    if uncut:
        raise PlanError(
            f"global_batch_size = {rows} on {world_size} devices: batches may not be cut ({'; '.join(uncut)}), so that "
            f"every device needs its own; use {max(1, round(rows / world_size)) * world_size} rows, or give "
            "data_parallel_size"
        )
    return None


ANYWHERE = -1
"""Start of a choice whose costs do not depend on where it lies."""


def layer_classes(spec: ModelSpec) -> tuple[int, ...]:
    """A number for every layer, equal for layers that cost the same and hand on the same."""
    sizes: list[list[tuple[int, bool]]] = [[] for _ in range(spec.num_layers)]
    alone = set()
    for parameter, regions in zip(spec.parameters, parameter_regions(spec), strict=True):
        for region in regions:
            if 1 <= region <= spec.num_layers:
                sizes[region - 1].append((parameter.bytes, parameter.trainable))
                if len(regions) > 1:
                    alone.add(region - 1)  # It shares a parameter with another part, so its place matters.
    # What the last layer hands on stays inside its stage.
    handed_on = [*spec.boundaries, ()]
    known: dict[Hashable, int] = {}
    result = []
    for index, kind in enumerate(spec.kinds):
        key = (kind, tuple(sorted(sizes[index])), index if index in alone else -1)
        passed = handed_on[index] if index < spec.num_layers - 1 else handed_on[max(0, index - 1)]
        result.append(known.setdefault((key, passed), len(known)))
    return tuple(result)


Role = Literal["only", "first", "middle", "last"]
"""Whether a stage has others before and behind it."""


def role_of(stage_index: int, num_stages: int) -> Role:
    """The role of a stage."""
    if num_stages == 1:
        return "only"
    if stage_index == 0:
        return "first"
    return "last" if stage_index == num_stages - 1 else "middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRanges:
    """Ranges of layers that cost differently.

    Attributes:
        start_K: First layer of one of those that cost the same.
        starts: First layers of all of them, or :data:`ANYWHERE` alone.
    """

    start_K: IntArray
    layers_K: IntArray
    starts: tuple[IntArray, ...]

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self.start_K)

    @property
    def count_K(self) -> IntArray:
        """At how many places each occurs."""
        return np.array([len(starts) for starts in self.starts], dtype=np.int64)


def fixed_range(first: int, end: int) -> LayerRanges:
    """The one range that a stage may have whose place is settled."""
    start_K = np.array([first], dtype=np.int64)
    return LayerRanges(start_K=start_K, layers_K=np.array([end - first], dtype=np.int64), starts=(start_K,))


def layer_ranges_of(role: Role, num_layers: int, classes: tuple[int, ...]) -> LayerRanges:
    """Every range of layers that a stage may have."""
    lengths = np.arange(1, num_layers)  # Every other stage needs a layer.
    if role == "middle":
        return _middle(num_layers, classes)
    if role == "only":
        start_K, layers_K = np.array([0]), np.array([num_layers])
    elif role == "first":
        start_K, layers_K = np.zeros_like(lengths), lengths
    else:
        start_K, layers_K = num_layers - lengths, lengths
    return LayerRanges(start_K=start_K, layers_K=layers_K, starts=tuple(start_K[:, None]))


def _middle(num_layers: int, classes: tuple[int, ...]) -> LayerRanges:
    """LayerRanges that touch neither end."""
    if len(set(classes)) == 1:
        layers_K = np.arange(1, num_layers - 1)
        starts = (np.array([ANYWHERE]),) * len(layers_K)
        return LayerRanges(start_K=np.ones_like(layers_K), layers_K=layers_K, starts=starts)
    places: dict[Hashable, list[int]] = {}
    for start in range(1, num_layers - 1):
        for end in range(start + 1, num_layers):
            # The class of the layer before tells what is received.
            places.setdefault(classes[start - 1 : end], []).append(start)
    return LayerRanges(
        start_K=np.array([starts[0] for starts in places.values()], dtype=np.int64),
        layers_K=np.array([len(window) - 1 for window in places], dtype=np.int64),  # type: ignore[arg-type]
        starts=tuple(np.array(starts) for starts in places.values()),
    )


def places_behind(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Stage and number of stages of all that may lie behind the first ones of pipelines, the last stage first."""
    found = []
    for behind in range(max(counts, default=1) - 1):
        num_stages = max(behind + 2, min(counts))
        found.append((num_stages - 1 - behind, num_stages))
    return found


def stages_dealt(counts: Collection[int], size: int, most: int) -> tuple[int, ...]:
    """Numbers of stages to which so many devices can be dealt, all of them, if a stage has one of some numbers."""
    # Bit ``n`` says whether the stages so far can have ``n`` devices together.
    sums, every, found = 1, (2 << size) - 1, []
    for num_stages in range(1, most + 1):
        sums = reduce(or_, (sums << count for count in counts), 0) & every
        if sums >> size:
            found.append(num_stages)
    return tuple(found)


_FEATURE_WORDS: dict[Feature, str] = {
    "pipeline": "several pipeline stages",
    "microbatches": "cutting a batch into microbatches",
    "checkpointing": "activation checkpointing",
    "sharded_gradients": "ZeRO",
    "sharded_parameters": "ZeRO-3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A search space applied to one network, batch and number of devices.

    Attributes:
        global_batch_size: Rows of a batch over all devices.
        data_parallel_size: How many distinct batches are loaded at once; None if as many as a plan has copies.
        cuts_batches: Whether a batch may be cut.
        checkpointing: Whether layers may be recomputed.
        checkpointing_kinds: What of them may be.
        tail_chunks: Into how many chunks what is behind the last layer may take a microbatch.
        cuts_tokens: Whether these are of tokens, so that their number need not divide that of rows.
        tensor: Tensor-parallel degrees, each with and without sequence parallelism as far as possible.
        devices_per_node: Devices of each node, within which tensor-parallel devices lie.
        notes: What was ruled out and why, for people.
    """

    search: SearchSpace
    num_layers: int
    world_size: int
    global_batch_size: int
    data_parallel_size: int | None
    max_stages: int
    cuts_batches: bool
    checkpointing: bool
    checkpointing_kinds: tuple[CheckpointingKind, ...]
    tail_chunks: tuple[int, ...]
    cuts_tokens: bool
    tensor: tuple[tuple[int, bool], ...]
    devices_per_node: int
    notes: tuple[str, ...]

    @property
    def schedule(self) -> ScheduleName:
        """The schedule of the exact search: 1F1B, unless GPipe is asked for and 1F1B is not."""
        return "gpipe" if "gpipe" in self.search.schedules and "1f1b" not in self.search.schedules else "1f1b"

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of devices that a stage may have, ascending."""
        asked = self.search.devices_per_stage
        if asked is not None:
            return tuple(sorted({count for count in asked if count <= self.world_size}))
        return divisors(self.world_size)

    def shapes(self, num_microbatches: int) -> tuple[Shape, ...]:
        """Arrangements of a stage's devices for which a batch is cut into equal parts, ascending."""
        return _shapes(self, num_microbatches)

    @property
    def methods(self) -> tuple[StageMethod, ...]:
        """How a stage may compute what it computes."""
        kinds, counts = self.checkpointing_kinds, sorted({1, *self.tail_chunks})
        return tuple(StageMethod(checkpointing=kind, tail_chunks=chunks) for kind in kinds for chunks in counts)

    def shapes_at(self, stage_index: int, num_stages: int, num_microbatches: int) -> tuple[Shape, ...]:
        """Those of one stage of pipelines with so many stages: only the last may cut what is behind its layers."""
        counts = self.tail_chunks if stage_index == num_stages - 1 else (1,)
        shapes = self.shapes_of(num_stages, num_microbatches)
        return tuple(shape for shape in shapes if shape.method.tail_chunks in counts)

    def shapes_of(self, num_stages: int, num_microbatches: int) -> tuple[Shape, ...]:
        """Those of the stages of pipelines with so many stages."""
        shapes = self.shapes(num_microbatches)
        if num_stages > 1 and not self.search.equal_stages:
            return shapes
        return tuple(shape for shape in shapes if shape.devices * num_stages == self.world_size)

    def least_replicas(self, num_microbatches: int) -> int:
        """The least number of independent copies of a pipeline that stages with these microbatches can form."""
        return self.replicas(shape.data for shape in self.shapes(num_microbatches))

    def replicas(self, data_degrees: Iterable[int]) -> int:
        """Copies of a pipeline that share no batch, by the data-parallel degrees of its stages."""
        return gcd(self.data_parallel_size or 0, common_unit(data_degrees))

    def loaders(self, data_degrees: Iterable[int]) -> int | None:
        """How many batches are loaded at once for a plan, as :attr:`Plan.data_parallel_size` has it."""
        found = self.data_parallel_size or self.replicas(data_degrees)
        return None if found == self.world_size else found

    def batch_rows(self, replicas: int) -> int:
        """Rows of the batch of each loader, by the number of copies of the pipeline."""
        return self.global_batch_size // (self.data_parallel_size or max(1, replicas))

    def rows(self, num_microbatches: int, data: int) -> int:
        """Rows that each device of a stage sees per microbatch, by the stage's data-parallel degree."""
        return self.global_batch_size // (num_microbatches * data)

    @property
    def stage_counts(self) -> tuple[int, ...]:
        """Numbers of stages to look at, ascending."""
        asked = self.search.num_stages if self.search.layer_cuts is None else (len(self.search.layer_cuts) + 1,)
        counts = (count for count in range(1, self.max_stages + 1) if asked is None or count in asked)
        if not self.search.equal_stages:
            return tuple(counts)
        return tuple(count for count in counts if self.num_layers % count == self.world_size % count == 0)

    def pipelines(self) -> tuple[tuple[int, int], ...]:
        """Every ``(number of stages, number of microbatches)`` for which devices can be dealt to stages."""
        stages, result = self.stage_counts, []
        for num_microbatches in self.microbatch_counts():
            counts = {shape.devices for shape in self.shapes(num_microbatches)}
            for num_stages in stages_dealt(counts, self.world_size, self.max_stages):
                if num_stages in stages and self.shapes_of(num_stages, num_microbatches):
                    result.append((num_stages, num_microbatches))
        return tuple(sorted(result))

    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of microbatches for which some stage cuts every batch into equal parts, ascending."""
        asked, loaders = self.search.num_microbatches, self.data_parallel_size or 1
        parts = divisors(self.global_batch_size // loaders) if self.cuts_batches else (1,)
        found = {part * loaders // data for part in parts for data in self.data_degrees() if part * loaders % data == 0}
        return tuple(sorted(found if asked is None else found & set(asked)))

    def data_degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees that a stage may have, ascending."""
        counts, degrees = self.device_counts, {degree for degree, _ in self.tensor}
        found = {count // degree for count in counts for degree in degrees if count % degree == 0}
        asked = self.search.data_parallel_degrees
        return tuple(sorted(found if asked is None else found & set(asked)))

    @property
    def offload_ratios(self) -> tuple[float, ...]:
        """Parts of state that may be in host memory, ascending; nothing if it has to stay on the device."""
        return (
            tuple(sorted({ratio for ratio in self.search.offload_ratios if ratio > 0})) if self.search.offload else ()
        )

    def cuts(self, num_stages: int) -> tuple[int, ...] | None:
        """Where every stage begins and the last ends, if that is settled."""
        cuts = self.search.layer_cuts
        if self.search.equal_stages:
            return tuple(self.num_layers * stage // num_stages for stage in range(num_stages + 1))
        return None if cuts is None or num_stages != len(cuts) + 1 else (0, *cuts, self.num_layers)

    def layer_range(self, stage_index: int, num_stages: int) -> tuple[int, int] | None:
        """The first layer of a stage and the one behind its last, if that is settled."""
        cuts = self.cuts(num_stages)
        return None if cuts is None else (cuts[stage_index], cuts[stage_index + 1])

    def recomputed(self, layers_K: IntArray) -> tuple[IntArray, IntArray]:
        """Every number of layers that stages may recompute: of which stage, and how many."""
        shares = self.search.checkpointed_shares
        if not self.checkpointing:
            return np.arange(len(layers_K)), np.zeros(len(layers_K), dtype=np.int64)
        if shares is not None:
            found = [sorted({round(share * layers) for share in shares}) for layers in layers_K.tolist()]
            window_J = np.repeat(np.arange(len(found)), [len(counts) for counts in found])
            return window_J, np.array([count for counts in found for count in counts], dtype=np.int64)
        window_J = np.repeat(np.arange(len(layers_K)), layers_K + 1)
        return window_J, np.arange(len(window_J)) - np.repeat(np.cumsum(layers_K + 1) - layers_K - 1, layers_K + 1)


@lru_cache(maxsize=1024)
def _shapes(space: Space, num_microbatches: int) -> tuple[Shape, ...]:
    found, counts, loaders = [], space.device_counts, space.data_parallel_size or 1
    for data in space.data_degrees():
        together, sizes = num_microbatches * data, space.search.microbatch_sizes
        if sizes is not None and space.rows(num_microbatches, data) not in sizes:
            continue
        is_equal = together % loaders == 0 == space.global_batch_size % together
        if is_equal and (together == loaders or space.cuts_batches):
            found += [
                Shape(data, *kind, method, shard)
                for kind in space.tensor
                if data * kind[0] in counts
                for method in space.methods
                if method.tail_chunks == 1
                or (
                    kind[0] == 1 and (space.cuts_tokens or space.rows(num_microbatches, data) % method.tail_chunks == 0)
                )
                for shard in shard_degrees(space.search, data)
            ]
    return tuple(sorted(found))


def apply(
    search: SearchSpace,
    spec: ModelSpec,
    world_size: int,
    global_batch_size: int,
    *,
    devices_per_node: int | None = None,
) -> Space:
    """The search space of one network on a number of devices.

    Args:
        spec: The network, whose exclusions are honoured.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        devices_per_node: Devices of each node; by default all are in one.

    Raises:
        PlanError: If the batch does not come in equal parts from the devices.
    """
    ruled_out = {feature: spec.module_map.excludes(feature) for feature in _FEATURE_WORDS}
    loaders = settled_loaders(search, world_size, global_batch_size, ruled_out["microbatches"])
    notes = _notes(ruled_out)
    if not spec.num_layers:
        notes.append("data parallelism only: the module has no repeated blocks to divide into stages or to recompute")
    cuts = search.layer_cuts
    if cuts is not None and cuts and (cuts[-1] >= max(1, spec.num_layers) or ruled_out["pipeline"]):
        raise PlanError(
            f"layer_cuts = {cuts}: {spec.name or 'the network'} has {spec.num_layers} layers, so that cuts lie between "
            f"1 and {spec.num_layers - 1}. {'; '.join(notes)}{'. ' if notes else ''}Leave layer_cuts out"
        )
    search = _without_ruled_out_sharding(search, spec.module_map, notes)
    per_node = world_size if devices_per_node is None else devices_per_node
    tensor, without = _tensor_kinds(search, spec, per_node)
    kinds, excluded = _checkpointing_kinds(search, spec)
    chunks, not_cut = _tail_chunks(search, spec)
    may_recompute = search.checkpointing and not ruled_out["checkpointing"] and spec.num_layers > 0 and bool(kinds)
    most = min(world_size, max(1, spec.num_layers), search.max_stages or world_size)
    return Space(
        search=search,
        num_layers=spec.num_layers,
        world_size=world_size,
        global_batch_size=global_batch_size,
        data_parallel_size=loaders,
        max_stages=1 if ruled_out["pipeline"] else most,
        cuts_batches=not ruled_out["microbatches"],
        checkpointing=may_recompute,
        checkpointing_kinds=kinds if may_recompute else ("full",),
        tail_chunks=chunks,
        cuts_tokens=spec.module_map.cuts_tokens and spec.sequence_length is not None,
        tensor=tensor,
        devices_per_node=per_node,
        notes=(*notes, *without, *not_cut, *(excluded if search.checkpointing else ())),
    )


def _checkpointing_kinds(search: SearchSpace, spec: ModelSpec) -> tuple[tuple[CheckpointingKind, ...], tuple[str, ...]]:
    """What of layers may be recomputed, and what was ruled out and why."""
    kinds = tuple(sorted(set(search.checkpointing_kinds)))
    if "selective" not in kinds:
        return kinds, ()
    degrees = ((1, False), *((item.degree, item.sequence_parallel) for item in spec.splits))
    known = all(spec.split(*degree).recomputes_by_operator for degree in degrees)
    reasons = spec.module_map.excludes("selective_checkpointing")
    if known and not reasons:
        return kinds, ()
    why = "; ".join(reasons) or f"what that costs is not known for {spec.name or 'the network'}"
    return tuple(kind for kind in kinds if kind != "selective"), (f"without selective checkpointing: {why}",)


def _tail_chunks(search: SearchSpace, spec: ModelSpec) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Into how many chunks what is behind the last layer may be cut, and what was ruled out and why."""
    reasons = spec.module_map.whole_tail
    if spec.tail.events is None:
        reasons = (
            *reasons,
            f"what that costs is not known for {spec.name or 'the network'}",
        )
    if max(search.tail_chunks) == 1 or not reasons:
        return search.tail_chunks, ()
    return (1,), (f"without chunks behind the last layer: {'; '.join(reasons)}",)


def _notes(ruled_out: Mapping[Feature, tuple[str, ...]]) -> list[str]:
    """What is ruled out and why, each reason once."""
    together: dict[tuple[str, ...], list[Feature]] = {}
    for feature, why in ruled_out.items():
        if why and not (feature == "sharded_parameters" and ruled_out["sharded_gradients"] == why):
            together.setdefault(why, []).append(feature)
    return [
        f"without {', '.join(_FEATURE_WORDS[feature] for feature in features)}: {'; '.join(why)}"
        for why, features in together.items()
    ]


def _without_ruled_out_sharding(search: SearchSpace, module_map: ModuleMap, notes: list[str]) -> SearchSpace:
    left = tuple(level for level in search.zero_stages if level <= module_map.largest_zero_stage)
    if not left:
        raise PlanError(
            f"zero_stages = {search.zero_stages}: {'; '.join(notes)}. Allow zero_stages up to "
            f"{module_map.largest_zero_stage}"
        )
    return search if left == search.zero_stages else replace(search, zero_stages=left)


def with_offload(
    space: Space, cluster: AnyCluster, profiles: Sequence[HardwareProfile], module_map: ModuleMap
) -> Space:
    """A search space whose kinds of offloaded state are settled.

    Where they are left to the devices, all are looked at on devices with memory of their own. Nothing is where the
    rates of copies between such devices and their hosts are not known, nor what the module has to have on its device.

    Args:
        profiles: How fast those of each part are.
        module_map: The module, whose exclusions are honoured.
    """
    if space.search.offload is None:
        every = OFFLOADED if cluster.kind == "cuda" else ()
        space = replace(space, search=replace(space.search, offload=every))
    space = _without_ruled_out_offload(space, module_map)
    if not space.search.offload or all(map(_knows_copies, profiles, cluster.parts)):
        return space
    note = "without offload: how fast devices copy from and to the host is not known"
    return replace(space, search=replace(space.search, offload=()), notes=(*space.notes, note))


def _without_ruled_out_offload(space: Space, module_map: ModuleMap) -> Space:
    reasons: dict[str, list[str]] = {}
    for kind in space.search.offloaded:
        reasons.setdefault("; ".join(module_map.excludes_offload(kind)), []).append(kind)
    left = tuple(reasons.pop("", ()))
    notes = tuple(f"without offload of {', '.join(kinds)}: {why}" for why, kinds in reasons.items())
    return replace(space, search=replace(space.search, offload=left), notes=(*space.notes, *notes)) if notes else space


def _knows_copies(profile: HardwareProfile, part: Cluster) -> bool:
    """Whether the rates of copies between a device and its host are known."""
    rates = profile.host_to_device_bytes_per_second, profile.device_to_host_bytes_per_second
    return part.device.kind != "cuda" or min(rates) > 0


def degrees_to_try(search: SearchSpace, devices_per_node: int) -> tuple[int, ...]:
    """The tensor-parallel degrees above 1 for which it is worth finding out how a module can be split.

    Args:
        devices_per_node: Devices that are near enough to share layers; only degrees that were asked for by name are
            larger, of whole nodes.
    """
    asked = search.tensor_parallel_degrees
    near = {count for count in divisors(devices_per_node) if 1 < count <= OPTIONS.sharing}
    if asked is None:
        return tuple(sorted(near))
    whole_nodes = {count for count in asked if count > devices_per_node and count % devices_per_node == 0}
    return tuple(sorted(near.intersection(asked) | whole_nodes))


def _tensor_kinds(
    search: SearchSpace, spec: ModelSpec, devices_per_node: int
) -> tuple[tuple[tuple[int, bool], ...], list[str]]:
    """Tensor-parallel degrees to look at, with and without sequence parallelism, and why there are no others.

    Degrees divide each other, and the devices of a node or these them, so that ranks that share layers always fit into
    a node or fill some.
    """
    asked, module_map = search.tensor_parallel_degrees, spec.module_map
    wanted = degrees_to_try(search, devices_per_node)
    known = {(item.degree, item.sequence_parallel) for item in spec.splits}
    possible = sorted({degree for degree, _ in known if degree in wanted})
    chain = longest_chain(possible)
    notes = []
    if wanted and not possible:
        why = "; ".join(module_map.excludes("tensor")) or "how its layers could be split is not known"
        notes.append(f"without tensor parallelism: {why}")
    elif left := [degree for degree in wanted if degree not in chain]:
        reasons: dict[str, list[int]] = {}
        for degree in left:
            reasons.setdefault(_why_left(degree, possible, module_map), []).append(degree)
        notes += [f"without tensor_parallel_degree {', '.join(map(str, of))}: {why}" for why, of in reasons.items()]
    kinds = [(1, False)] if asked is None or 1 in asked else []
    for sequence in (False, True):
        if search.sequence_parallel in (None, sequence):
            kinds += [(degree, sequence) for degree in chain if (degree, sequence) in known]
    if chain and search.sequence_parallel is not False and not any(sequence for _, sequence in kinds):
        why = "; ".join(module_map.excludes("sequence")) or "where its layers could be split is not known"
        notes.append(f"without sequence parallelism: {why}")
    return tuple(sorted(kinds)), notes


def _why_left(degree: int, possible: list[int], module_map: ModuleMap) -> str:
    if degree in possible:
        return "degrees of one plan must divide each other"
    return dict(module_map.unsplit).get(degree, "they do not divide what would be split")


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(value for value in range(1, number + 1) if number % value == 0)


def common_unit(counts: Iterable[int]) -> int:
    """The greatest common divisor of some counts."""
    return reduce(gcd, counts, 0)
