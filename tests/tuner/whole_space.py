"""Questions to the whole planner, and the best plan of each by trying everything; for tests only.

What a plan may be is written down here a second time, from what plans are rather than from how the search goes through
them. Every stage candidate is priced by the cost model, and every way to put stages together is tried. The one thing
that is left out: of stage candidates with the same layers and devices those that another equals or beats in both
steady and boundary time. That is safe because the step

    (G - 1) max t + sum t + max(0, max_i (d_i - sum_{j<i} t_j))

never falls when a ``t`` or a ``d`` rises: a ``t`` that rises by one lets the last term fall by at most one, and the
second rises by one.
"""

import itertools
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from lightning_mist.cost import StageCandidates, StageSlot, cost_model, step_seconds_of
from lightning_mist.cost.inputs.candidates import OffloadCandidates
from lightning_mist.cost.memory.moments import device_moments
from lightning_mist.hardware import USABLE_HOST_MEMORY, AnyCluster, HardwareProfile
from lightning_mist.model.spec.model_spec import ModelSpec
from lightning_mist.plan import AS_IT_IS, OFFLOAD_KINDS, StageMethod
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.space.usable_memory import USABLE_MEMORY

ALL = -1
"""Where the only stage of a plan on unlike devices lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One question to the planner.

    Attributes:
        network: The network.
        machine: Its devices, of one kind or of several.
        rates: How fast they are, of unlike devices those of every part.
        rows: Rows of a batch over all devices, for each of them.
        rows_left: Rows beyond these.
        memory_limit: Bytes of each device.
        host_memory_limit: Bytes of each node's host memory that offloading may take, its devices equal parts of it;
            ``None`` for what its host has, as far as that is described.
        search: The space.
        known: What stage candidates cost, which does not depend on limits.
    """

    network: ModelSpec
    machine: AnyCluster
    rates: HardwareProfile | tuple[HardwareProfile, ...]
    rows: int
    memory_limit: int
    search: SearchSpace
    host_memory_limit: int | None = None
    rows_left: int = 0
    known: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def kind(self):
        """What sets it apart from others."""
        devices = "one kind of devices" if len(self.machine.parts) == 1 else "unlike devices"
        return f"{devices}, {'with' if self.search.offload else 'without'} offload"

    @property
    def global_batch_size(self):
        return self.rows * self.machine.world_size + self.rows_left

    @property
    def loaders(self):
        """Batches that are loaded at once; ``None`` if as many as there are copies of a pipeline."""
        world = self.machine.world_size
        return self.search.data_parallel_size or (world if self.global_batch_size % world == 0 else None)

    def clusters(self, part):
        """The devices of a part, or of every one."""
        return self.machine.parts if part == ALL else (self.machine.parts[part],)

    def limit(self, part):
        """Bytes that tensors may take on each device of a part."""
        share = USABLE_MEMORY if self.machine.kind == "cuda" else 1.0
        limits = [self.memory_limit]
        if len(self.machine.parts) > 1:  # A limit on unlike devices may be more than some have.
            limits += [item.device.memory_bytes for item in self.clusters(part)]
        return min(limits) * share

    def host_limit(self, part):
        """Bytes of host memory that each device of a part may take."""
        return min(self._node_limit(item) / item.devices_per_node for item in self.clusters(part))

    def _node_limit(self, part):
        """Bytes of each node's host that all its devices may take together."""
        if self.host_memory_limit is not None:
            return self.host_memory_limit
        if part.host_memory_bytes is None:
            return np.inf
        own = 0 if part.kind == "cuda" else part.devices_per_node * part.device.memory_bytes
        return max(0.0, USABLE_HOST_MEMORY * part.host_memory_bytes - own)

    def planner(self):
        """A planner that knows nothing yet."""
        return Planner(self.network, self.machine, profile=self.rates)

    def tune(self, planner=None):
        """The planner's answer.

        Args:
            planner: One that may have been asked before; by default a new one.
        """
        return (planner or self.planner()).tune(
            global_batch_size=self.global_batch_size,
            memory_limit=self.memory_limit,
            host_memory_limit=self.host_memory_limit,
            search=self.search,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """What trying everything finds.

    Attributes:
        seconds: The least step seconds by the closed form of any plan that fits; infinite if none does.
        peak: The least bytes that any plan needs on its fullest device.
        plans: Plans that there are, whether they fit or not.
        candidates: Stage candidates that were priced.
    """

    seconds: float
    peak: float
    plans: int
    candidates: int


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """How the devices of a stage are arranged."""

    data: int
    tensor: int
    sequence: bool
    method: StageMethod = AS_IT_IS
    shard: int = 0

    @property
    def devices(self):
        return self.data * self.tensor


def kinds_of(instance, count, part):
    """Arrangements of a stage with which ``count`` microbatches cut every device's batch into equal parts."""
    batch, here = instance.global_batch_size, instance.clusters(part)
    size = sum(item.world_size for item in here)
    near = gcd(*(item.devices_per_node for item in here))
    search = instance.search
    ways = {(item.degree, item.sequence_parallel) for item in instance.network.splits if near % item.degree == 0}
    counts = search.devices_per_stage or [count for count in range(1, size + 1) if size % count == 0]
    found = []
    for devices, (tensor, sequence) in itertools.product(counts, [(1, False), *sorted(ways)]):
        data, rest = divmod(devices, tensor)
        if rest or devices > size or (part == ALL and devices < size):
            continue
        if search.sequence_parallel not in (None, sequence) and tensor > 1:
            continue
        if not among(tensor, search.tensor_parallel_degrees) or not among(data, search.data_parallel_degrees):
            continue
        # Each device of the stage sees a part of one loader's batch in each microbatch, all of them equal.
        if count * data % (instance.loaders or 1) or batch % (count * data):
            continue
        if among(batch // (count * data), search.microbatch_sizes):
            kinds = search.checkpointing_kinds if search.checkpointing and instance.network.num_layers else ("full",)
            groups = (
                [0, *(n for n in search.shard_degrees if n < data and data % n == 0)]
                if any(search.zero_stages)
                else [0]
            )
            of_tokens = instance.network.module_map.cuts_tokens
            fitting = (n for n in search.tail_chunks if of_tokens or batch // (count * data) % n == 0)
            counts = {1} if tensor > 1 else {1, *fitting}
            methods = [StageMethod(checkpointing=kind, tail_chunks=n) for kind in kinds for n in sorted(counts)]
            found += [Kind(data, tensor, sequence, *each) for each in itertools.product(methods, groups)]
    return found


def among(value, asked):
    """Whether a value is one of those asked for, or none were."""
    return asked is None or value in asked


def orders(instance, stages):
    """Every way in which stages may lie in parts: those of one part follow each other, parts come in any order."""
    parts = range(len(instance.machine.parts))
    if len(parts) == 1:
        yield (0,) * stages
    elif stages == 1:
        yield (ALL,)
    else:
        for order in itertools.permutations(parts):
            for cuts in itertools.combinations(range(1, stages), len(parts) - 1):
                edges = (0, *cuts, stages)
                yield tuple(
                    part for part, (a, b) in zip(order, itertools.pairwise(edges), strict=True) for _ in range(a, b)
                )


def pipelines(instance):
    """Every number of microbatches, with the part of every stage and every sequence of arrangements."""
    world, layers, search = instance.machine.world_size, instance.network.num_layers, instance.search
    for count, stages in itertools.product(
        range(1, instance.global_batch_size + 1), range(1, min(world, max(1, layers)) + 1)
    ):
        if not among(count, search.num_microbatches) or not among(stages, search.num_stages):
            continue
        if search.layer_cuts is not None and stages != len(search.layer_cuts) + 1:
            continue
        if search.equal_stages and (layers % stages or world % stages):
            continue
        for parts in orders(instance, stages):
            rows = itertools.product(*(kinds_of(instance, count, part) for part in parts))
            each = [row for row in rows if uses_all(instance, parts, row) and cuts_at_the_end(instance, row)]
            if search.equal_stages:
                each = [row for row in each if len({kind.devices for kind in row}) == 1]
            if each:
                yield count, parts, each


def cuts_at_the_end(instance, row):
    """Whether the last stage alone takes chunks behind its layers, as many as are asked for."""
    *others, last = (kind.method.tail_chunks for kind in row)
    return set(others) <= {1} and last in instance.search.tail_chunks


def uses_all(instance, parts, row):
    """Whether stages use every device of every part."""
    return all(
        sum(kind.devices for kind, where in zip(row, parts, strict=True) if where == part)
        == sum(item.world_size for item in instance.clusters(part))
        for part in set(parts)
    )


def slot_of(instance, count, parts, index, kind):
    """A place in a pipeline."""
    everywhere = range(len(instance.machine.parts))
    # Copies of a pipeline are independent as far as all of its stages divide alike: at least what all could.
    datas = [item.data for part in everywhere for item in kinds_of(instance, count, part)]
    replicas = gcd(instance.loaders or 0, *([kind.data] if len(parts) == 1 else datas))
    return StageSlot(
        stage_index=index,
        num_stages=len(parts),
        num_microbatches=count,
        data_parallel_degree=kind.data,
        rows=instance.global_batch_size // (count * kind.data),
        batch_rows=instance.global_batch_size // (instance.loaders or replicas),
        replicas=replicas,
        tensor_parallel_degree=kind.tensor,
        sequence_parallel=kind.sequence,
        method=kind.method,
        shard_group=kind.shard or None,
        parts=parts if len(everywhere) > 1 and len(parts) > 1 else (),
    )


def candidates_of(instance, stages, index, kind):
    """Every range of layers that leaves one for each other stage, recomputed layers, ZeRO stages, offloaded shares."""
    layers, search = instance.network.num_layers, instance.search
    shares = tuple(sorted({0.0, *search.offload_ratios}))
    stays = ("activations", "checkpoints") if kind.method.checkpointing == "selective" else ()
    moved = [name for name in search.offload if name not in stays]
    offload = list(itertools.product(*(shares if name in moved else (0.0,) for name in OFFLOAD_KINDS)))
    if "checkpoints" not in search.offload:  # As activations.
        offload = [(*ratios[:-1], ratios[-2]) for ratios in offload]
    rows = []
    for start, end in itertools.combinations_with_replacement(range(layers + 1), 2):
        if (start == end and layers) or (start == 0) != (index == 0) or (end == layers) != (index == stages - 1):
            continue
        if layers and (start < index or layers - end < stages - 1 - index):
            continue
        edges = (0, *(search.layer_cuts or ()), layers)
        if search.layer_cuts is not None and (start, end) != (edges[index], edges[index + 1]):
            continue
        if search.equal_stages and (end - start) * stages != layers:
            continue
        recomputed = range(end - start + 1) if search.checkpointing else (0,)
        if search.checkpointing and search.checkpointed_shares is not None:
            recomputed = sorted({round(share * (end - start)) for share in search.checkpointed_shares})
        levels = [level for level in search.zero_stages if level or not kind.shard] if kind.data > 1 else [0]
        rows += [(*row, *moved) for row in itertools.product((start,), (end,), recomputed, levels) for moved in offload]
    return np.array(rows, dtype=np.float64).reshape(-1, 4 + len(OFFLOAD_KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Stage candidates of one place with what they cost.

    Attributes:
        ranges_K: First layer and one past the last.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        peak_K: Peak bytes of a device.
        host_K: Bytes of host memory of a device.
    """

    ranges_K: np.ndarray
    steady_K: np.ndarray
    boundary_K: np.ndarray
    peak_K: np.ndarray
    host_K: np.ndarray


def priced(instance, count, parts, index, kind):
    """Everything that a place may have, and what it costs."""
    if "model" not in instance.known:
        instance.known["model"] = cost_model(instance.network, instance.rates, instance.machine)
    key = (count, parts, index, kind)
    if key not in instance.known:
        rows = candidates_of(instance, len(parts), index, kind)
        slot = slot_of(instance, count, parts, index, kind)
        instance.known[key] = _prices(instance.known["model"], slot, rows)
    return instance.known[key]


def _prices(model, slot, rows):
    """What candidates cost; those that move nothing are priced as what they are, without offload."""
    moves_K = rows[:, 4:].any(axis=1)
    costs = np.empty((4, len(rows)))
    for moves in (False, True):
        if (moves_K == moves).any():
            costs[:, moves_K == moves] = _costs(model, slot, rows[moves_K == moves], moves)
    steady_K, boundary_K, peak_K, host_K = costs
    ranges_K = rows[:, :2].astype(np.int64)
    return Prices(ranges_K=ranges_K, steady_K=steady_K, boundary_K=boundary_K, peak_K=peak_K, host_K=host_K)


def _costs(model, slot, rows, moves):
    start_K, end_K, recomputed_K, zero_K = rows[:, :4].T.astype(np.int64)
    candidates = StageCandidates(start_K=start_K, end_K=end_K, checkpointed_K=recomputed_K, zero_stage_K=zero_K)
    if moves:
        candidates = replace(candidates, offload=OffloadCandidates.of_kinds(rows[:, 4:]))
    seconds, needs = model.seconds(slot, candidates), model.memory(slot).needs(slot, candidates)
    moments = device_moments(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
    return seconds.steady_K, seconds.boundary_K, needs.peaks(moments), needs.host_bytes(moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a stage may be with some layers and devices: seconds of what fits, the least peak of all, how many."""

    steady_K: np.ndarray
    boundary_K: np.ndarray
    peak: float
    count: int


def undominated(steady_K, boundary_K):
    """Indices of points that no other equals or beats in both values."""
    kept, least = [], np.inf
    for index in np.lexsort((boundary_K, steady_K)):
        if boundary_K[index] < least:
            kept.append(index)
            least = boundary_K[index]
    return np.array(kept, dtype=np.int64)


def options_of(instance, count, parts, index, kind, *, reduced):
    """By range of layers: what a stage may be; and how many candidates there are."""
    prices = priced(instance, count, parts, index, kind)
    found = {}
    for start, end in np.unique(prices.ranges_K, axis=0).tolist():
        here_K = (prices.ranges_K == (start, end)).all(axis=1)
        allowed_K = here_K & (prices.host_K <= instance.host_limit(parts[index]))
        fit_J = np.flatnonzero(allowed_K & (prices.peak_K <= instance.limit(parts[index])))
        if reduced:
            fit_J = fit_J[undominated(prices.steady_K[fit_J], prices.boundary_K[fit_J])]
        found[start, end] = Options(
            steady_K=prices.steady_K[fit_J],
            boundary_K=prices.boundary_K[fit_J],
            peak=float(prices.peak_K[allowed_K].min()),
            count=int(here_K.sum()),
        )
    return found, len(prices.steady_K)


def together(chosen, count):
    """The least step seconds of all combinations of what each stage may be."""
    sizes = [len(item.steady_K) for item in chosen]
    if not np.prod(sizes):
        return np.inf
    index_SK = np.indices(sizes).reshape(len(sizes), -1)
    steady_SK = np.stack([item.steady_K[index] for item, index in zip(chosen, index_SK, strict=True)])
    boundary_SK = np.stack([item.boundary_K[index] for item, index in zip(chosen, index_SK, strict=True)])
    return float(step_seconds_of(steady_SK, boundary_SK, count).min())


def by_trying_everything(instance, *, reduced=True):
    """The best plan and the least demanding one.

    Args:
        instance: The question.
        reduced: Whether dominated stage candidates are left out.
    """
    layers, best, peak, plans, candidates = instance.network.num_layers, np.inf, np.inf, 0, 0
    for count, parts, arrangements in pipelines(instance):
        known = {}
        for index, kind in places_of(arrangements):
            known[index, kind], priced_here = options_of(instance, count, parts, index, kind, reduced=reduced)
            candidates += priced_here
        for row, cuts in itertools.product(arrangements, itertools.combinations(range(1, layers), len(parts) - 1)):
            edges = (0, *cuts, layers)
            if instance.search.layer_cuts not in (None, cuts):
                continue
            if instance.search.equal_stages and len({end - start for start, end in itertools.pairwise(edges)}) > 1:
                continue
            chosen = [known[index, kind][edges[index], edges[index + 1]] for index, kind in enumerate(row)]
            plans += int(np.prod([item.count for item in chosen]))
            peak = min(peak, max(item.peak for item in chosen))
            best = min(best, together(chosen, count))
    return Best(seconds=best, peak=peak, plans=plans, candidates=candidates)


def places_of(arrangements):
    """Every stage with every arrangement that it has in some of these."""
    return sorted({(index, kind) for row in arrangements for index, kind in enumerate(row)})
