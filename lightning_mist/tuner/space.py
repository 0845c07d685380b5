"""Which plans are looked at.

With ``N`` devices that each load batches of ``B`` rows, ``G`` microbatches and a stage of ``n`` devices, of which each
``t`` share every layer (tensor parallelism) and the ``d = n / t`` groups of them are data-parallel, each device of the
stage computes on ``B N / (G d)`` rows per microbatch. A part of a microbatch never mixes the batches of two ranks
(:mod:`lightning_mist.plan.rows`), so ``G d / N``, the number of parts that this stage cuts a batch into, is a whole
number; it divides ``B``, so that all parts are equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import gcd

from lightning_mist.errors import PlanError
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import Feature, ModuleMap, ScheduleName, StageMesh
from lightning_mist.plan.layout import longest_chain
from lightning_mist.plan.plan import SCHEDULES

_FEATURE_WORDS: dict[Feature, str] = {
    "pipeline": "several pipeline stages",
    "microbatches": "cutting a batch into microbatches",
    "checkpointing": "activation checkpointing",
}

OFFLOADED = ("parameters", "gradients", "optimizer", "activations")
"""Kinds of state that may be in host memory."""

_MOST_SHARING = 8
"""The most devices that are tried to share layers. Narayanan et al., 2021, section 3, advise as many as a node has, and
theirs have 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Limits of the search for a plan. The defaults look at everything that the runtime can execute.

    Attributes:
        max_stages: The most pipeline stages; ``None`` for as many as there are devices or layers.
        num_stages: The numbers of stages to look at; ``None`` for all up to ``max_stages``.
        num_microbatches: The numbers of microbatches per batch to look at; ``None`` for all that the batch allows.
        devices_per_stage: The numbers of devices that a stage may have; ``None`` for every divisor of the number of
            devices. Stages of one plan may differ.
        zero_stages: Which ZeRO stages data-parallel ranks may use: 0 (nothing is sharded), 1 (optimizer state), 2 (also
            gradients), 3 (also parameters).
        tensor_parallel_degrees: How many devices may share every layer of a stage; ``None`` for every number that the
            module and the nodes allow. Stages of one plan may differ.
        sequence_parallel: Whether devices that share layers also share what lies between them along the sequence:
            always, never, or ``None`` for what is faster.
        checkpointing: Whether layers may be recomputed in backward to save memory.
        offload: Which kinds of state may be in host memory: of ``"parameters"``, ``"gradients"``, ``"optimizer"`` and
            ``"activations"``. What the runtime does not execute yet is for forecasts only.
        offload_ratios: Which parts of each of these may be there, fractions in [0, 1]; 0 is always among them.
        schedules: Pipeline schedules to choose from. The search is exact for ``"1f1b"`` and ``"gpipe"`` (which is never
            faster and keeps more); ``"interleaved-1f1b"`` and ``"zb-h1"`` are tried on the pipelines that it finds.
        solver_seconds: The most seconds that the search may spend on solving. When they are over the best plan found
            so far is used, and the result says how far from the best possible it may be.
    """

    max_stages: int | None = None
    num_stages: tuple[int, ...] | None = None
    num_microbatches: tuple[int, ...] | None = None
    devices_per_stage: tuple[int, ...] | None = None
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    tensor_parallel_degrees: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None
    checkpointing: bool = True
    offload: tuple[str, ...] = OFFLOADED
    offload_ratios: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "interleaved-1f1b", "zb-h1")
    solver_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check each limit by itself."""
        if self.max_stages is not None and self.max_stages < 1:
            raise ValueError(f"max_stages={self.max_stages}: a plan has at least 1 stage")
        for name in ("num_stages", "num_microbatches", "devices_per_stage", "tensor_parallel_degrees"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise ValueError(f"{name}={values}: give at least one number, each at least 1, or None for all")
        if not self.zero_stages or not set(self.zero_stages) <= {0, 1, 2, 3}:
            raise ValueError(f"zero_stages={self.zero_stages}: ZeRO has stages 0 to 3; give for example (0, 1, 2, 3)")
        if not set(self.offload) <= set(OFFLOADED):
            raise ValueError(f"offload={self.offload}: of {', '.join(OFFLOADED)}; give () to offload nothing")
        if not all(0.0 <= ratio <= 1.0 for ratio in self.offload_ratios):
            raise ValueError(f"offload_ratios={self.offload_ratios}: each lies in [0, 1], for example (0.0, 0.5, 1.0)")
        if not self.schedules or not set(self.schedules) <= set(SCHEDULES):
            raise ValueError(f"schedules={self.schedules}: give at least one; known are {', '.join(SCHEDULES)}")
        if not self.solver_seconds > 0:
            raise ValueError(f"solver_seconds={self.solver_seconds}: some time is needed, for example 60")


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How the devices of a stage are arranged.

    Attributes:
        data: Data-parallel degree.
        tensor: Tensor-parallel degree.
        sequence: Whether tensor-parallel devices are sequence-parallel too.
    """

    data: int
    tensor: int = 1
    sequence: bool = False

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A search space applied to one network, batch and number of devices.

    Attributes:
        search: The limits asked for.
        num_layers: Layers of the network.
        world_size: Devices.
        batch_rows: Rows of the batch that each device loads.
        max_stages: The most stages.
        cuts_batches: Whether a batch may be cut.
        checkpointing: Whether layers may be recomputed.
        tensor: Tensor-parallel degrees, each with and without sequence parallelism as far as possible.
        devices_per_node: Devices of each node, within which tensor-parallel devices lie.
        notes: What was ruled out and why, for people.
    """

    search: SearchSpace
    num_layers: int
    world_size: int
    batch_rows: int
    max_stages: int
    cuts_batches: bool
    checkpointing: bool
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

    def least_replicas(self, num_microbatches: int) -> int:
        """The least number of independent copies of a pipeline that stages with these microbatches can form."""
        return common_unit(shape.data for shape in self.shapes(num_microbatches))

    def rows(self, num_microbatches: int, data: int) -> int:
        """Rows that each device of a stage sees per microbatch, by the stage's data-parallel degree."""
        return self.batch_rows * self.world_size // (num_microbatches * data)

    def pipelines(self) -> tuple[tuple[int, int], ...]:
        """Every ``(number of stages, number of microbatches)`` for which devices can be dealt to stages."""
        asked = self.search.num_stages
        stages = [s for s in range(1, self.max_stages + 1) if asked is None or s in asked]
        result = []
        for num_microbatches in self.microbatch_counts():
            counts = sorted({shape.devices for shape in self.shapes(num_microbatches)})
            sums = {0}
            for num_stages in range(1, self.max_stages + 1):
                sums = {total + count for total in sums for count in counts if total + count <= self.world_size}
                if num_stages in stages and self.world_size in sums:
                    result.append((num_stages, num_microbatches))
        return tuple(sorted(result))

    def microbatch_counts(self) -> tuple[int, ...]:
        """Numbers of microbatches for which some stage cuts every batch into equal parts, ascending."""
        asked = self.search.num_microbatches
        parts = divisors(self.batch_rows) if self.cuts_batches else (1,)
        found = {
            part * self.world_size // data
            for part in parts
            for data in self.data_degrees()
            if part * self.world_size % data == 0
        }
        return tuple(sorted(found if asked is None else found & set(asked)))

    def data_degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees that a stage may have, ascending."""
        counts, degrees = self.device_counts, {degree for degree, _ in self.tensor}
        return tuple(sorted({count // degree for count in counts for degree in degrees if count % degree == 0}))


@lru_cache(maxsize=1024)
def _shapes(space: Space, num_microbatches: int) -> tuple[Shape, ...]:
    found, counts = [], space.device_counts
    for data in space.data_degrees():
        parts, rest = divmod(num_microbatches * data, space.world_size)
        if rest == 0 and parts >= 1 and space.batch_rows % parts == 0 and (parts == 1 or space.cuts_batches):
            found += [Shape(data, *kind) for kind in space.tensor if data * kind[0] in counts]
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
        search: The limits asked for.
        spec: The network, whose exclusions are honoured.
        world_size: Devices.
        global_batch_size: Rows that one Lightning batch brings over all devices.
        devices_per_node: Devices of each node; by default all are in one.

    Raises:
        PlanError: If the batch does not come in equal parts from the devices.
    """
    if global_batch_size < 1 or global_batch_size % world_size:
        raise PlanError(
            f"global_batch_size = {global_batch_size} on {world_size} devices: every device loads an equal batch, so "
            f"it must be a multiple of {world_size}; use "
            f"{max(1, round(global_batch_size / world_size)) * world_size}"
        )
    ruled_out = {feature: spec.module_map.excludes(feature) for feature in _FEATURE_WORDS}
    notes = [f"without {_FEATURE_WORDS[name]}: {'; '.join(why)}" for name, why in ruled_out.items() if why]
    if not spec.num_layers:
        notes.append("data parallelism only: the module has no repeated blocks to divide into stages or to recompute")
    per_node = world_size if devices_per_node is None else devices_per_node
    tensor, without = _tensor_kinds(search, spec, per_node)
    most = min(world_size, max(1, spec.num_layers), search.max_stages or world_size)
    return Space(
        search=search,
        num_layers=spec.num_layers,
        world_size=world_size,
        batch_rows=global_batch_size // world_size,
        max_stages=1 if ruled_out["pipeline"] else most,
        cuts_batches=not ruled_out["microbatches"],
        checkpointing=search.checkpointing and not ruled_out["checkpointing"] and spec.num_layers > 0,
        tensor=tensor,
        devices_per_node=per_node,
        notes=(*notes, *without),
    )


def degrees_to_try(search: SearchSpace, devices_per_node: int) -> tuple[int, ...]:
    """The tensor-parallel degrees above 1 for which it is worth finding out how a module can be split.

    Args:
        search: What may be searched.
        devices_per_node: Devices that are near enough to share layers.
    """
    asked = search.tensor_parallel_degrees
    near = [count for count in divisors(devices_per_node) if 1 < count <= _MOST_SHARING]
    return tuple(count for count in near if asked is None or count in asked)


def _tensor_kinds(
    search: SearchSpace, spec: ModelSpec, devices_per_node: int
) -> tuple[tuple[tuple[int, bool], ...], list[str]]:
    """Tensor-parallel degrees to look at, with and without sequence parallelism, and why there are no others.

    Degrees divide each other and the devices of a node, so that ranks that share layers always fit into nodes.
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
