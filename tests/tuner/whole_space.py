"""Random small instances of the whole planner, and the best plan of each by trying everything; for tests only.

What a plan may be is written down here a second time, from what plans are rather than from how the search goes through
them. Every stage candidate is priced by the cost model, and every way to put stages together is tried. The one thing
that is left out: of stage candidates with the same layers and devices those that another equals or beats in both
steady and boundary time. That is safe because the step

    (G - 1) max t + sum t + max(0, max_i (d_i - sum_{j<i} t_j))

never falls when a ``t`` or a ``d`` rises: a ``t`` that rises by one lets the last term fall by at most one, and the
second rises by one.
"""

import itertools
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from lightning_mist.cost import StageCandidates, StageCostModel, StageSlot, step_seconds_of
from lightning_mist.cost.candidates import OffloadCandidates
from lightning_mist.cost.offload import host_bytes
from lightning_mist.cost.phases import stage_phases
from lightning_mist.errors import InfeasibleError
from lightning_mist.hardware import Cluster, HardwareProfile
from lightning_mist.model.spec import ModelSpec
from lightning_mist.tuner import Planner, SearchSpace
from lightning_mist.tuner.budget import USABLE_MEMORY
from lightning_mist.tuner.space import OFFLOADED
from tests.specs import cluster, profile, spec, with_splits

MOST_CANDIDATES = 15_000
"""Stage candidates that an instance may have, so that each takes a fraction of a second."""


OFFLOADING = 0.0
"""Share of instances whose spaces offload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One question to the planner.

    Attributes:
        network: The network.
        machine: Its devices.
        rates: How fast they are.
        rows: Rows of the batch that each device loads.
        memory_limit: Bytes of each device.
        host_memory_limit: Bytes of each node's host memory that offloading may take, its devices equal parts of it;
            ``None`` for as many as it wants.
        search: The space.
        known: What stage candidates cost, which does not depend on limits.
    """

    network: ModelSpec
    machine: Cluster
    rates: HardwareProfile
    rows: int
    memory_limit: int
    search: SearchSpace
    host_memory_limit: int | None = None
    known: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def limit(self):
        """Bytes that tensors may take on each device."""
        return self.memory_limit * (USABLE_MEMORY if self.machine.device.kind == "cuda" else 1.0)

    @property
    def host_limit(self):
        """Bytes of host memory that each device may take."""
        limit = self.host_memory_limit
        return np.inf if limit is None else limit / self.machine.devices_per_node

    @property
    def kind(self):
        """What sets it apart from others."""
        return "with offload" if self.search.offload else "without offload"

    def planner(self):
        """A planner that knows nothing yet."""
        return Planner(self.network, self.machine, profile=self.rates)

    def tune(self, planner=None):
        """The planner's answer.

        Args:
            planner: One that may have been asked before; by default a new one.
        """
        return (planner or self.planner()).tune(
            global_batch_size=self.rows * self.machine.world_size,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How the devices of a stage are arranged."""

    data: int
    tensor: int
    sequence: bool

    @property
    def devices(self):
        return self.data * self.tensor


def kinds_of(instance, count):
    """Arrangements with which ``count`` microbatches cut every device's batch into equal parts."""
    world = instance.machine.world_size
    splits = {(item.degree, item.sequence_parallel) for item in instance.network.splits}
    splits = {item for item in splits if instance.machine.devices_per_node % item[0] == 0}
    asked = instance.search.tensor_parallel_degrees
    ways = [(1, False), *sorted(splits)]
    found = []
    for devices, (tensor, sequence) in itertools.product(range(1, world + 1), ways):
        if world % devices or devices % tensor or (asked is not None and tensor not in asked):
            continue
        if tensor > 1 and instance.search.sequence_parallel not in (None, sequence):
            continue
        data = devices // tensor
        # Each device of the stage sees a part of one device's batch in each microbatch.
        if count * data % world == 0 and instance.rows % (count * data // world) == 0:
            found.append(Kind(data=data, tensor=tensor, sequence=sequence))
    return found


def pipelines(instance):
    """Every number of stages and of microbatches, with every sequence of arrangements."""
    world, layers = instance.machine.world_size, instance.network.num_layers
    for count in range(1, world * instance.rows + 1):
        if instance.search.num_microbatches is not None and count not in instance.search.num_microbatches:
            continue
        kinds = kinds_of(instance, count)
        for stages in range(1, min(world, max(1, layers)) + 1):
            if instance.search.num_stages is not None and stages not in instance.search.num_stages:
                continue
            each = [row for row in itertools.product(kinds, repeat=stages) if sum(k.devices for k in row) == world]
            if each:
                yield count, stages, each


def slot_of(instance, count, stages, index, kind):
    """A place in a pipeline."""
    world = instance.machine.world_size
    # Copies of a pipeline are independent as far as all of its stages divide alike: at least what all could.
    copies = kind.data if stages == 1 else gcd(*(item.data for item in kinds_of(instance, count)))
    return StageSlot(
        stage_index=index,
        num_stages=stages,
        num_microbatches=count,
        data_parallel_degree=kind.data,
        rows=instance.rows * world // (count * kind.data),
        batch_rows=instance.rows,
        replicas=copies,
        tensor_parallel_degree=kind.tensor,
        sequence_parallel=kind.sequence,
    )


def candidates_of(instance, stages, index, kind):
    """Every range of layers that leaves one for each other stage, recomputed layers, ZeRO stages, offloaded shares."""
    layers, search = instance.network.num_layers, instance.search
    shares = tuple(sorted({0.0, *search.offload_ratios}))
    offload = list(itertools.product(*(shares if name in search.offload else (0.0,) for name in OFFLOADED)))
    rows = []
    for start, end in itertools.combinations_with_replacement(range(layers + 1), 2):
        if (start == end and layers) or (start == 0) != (index == 0) or (end == layers) != (index == stages - 1):
            continue
        if layers and (start < index or layers - end < stages - 1 - index):
            continue
        recomputed = range(end - start + 1) if search.checkpointing else (0,)
        levels = search.zero_stages if kind.data > 1 else (0,)
        rows += [(*row, *moved) for row in itertools.product((start,), (end,), recomputed, levels) for moved in offload]
    return np.array(rows, dtype=np.float64).reshape(-1, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Stage candidates of one place with what they cost.

    Attributes:
        range_K2: First layer and one past the last.
        steady_K: Steady seconds.
        boundary_K: Boundary seconds.
        peak_K: Peak bytes of a device.
        host_K: Bytes of host memory of a device.
    """

    range_K2: np.ndarray
    steady_K: np.ndarray
    boundary_K: np.ndarray
    peak_K: np.ndarray
    host_K: np.ndarray


def priced(instance, count, stages, index, kind):
    """Everything that a place may have, and what it costs."""
    if "model" not in instance.known:
        instance.known["model"] = StageCostModel(instance.network, instance.rates, instance.machine)
    key = (count, stages, index, kind)
    if key not in instance.known:
        rows = candidates_of(instance, stages, index, kind)
        slot = slot_of(instance, count, stages, index, kind)
        instance.known[key] = _prices(instance.known["model"], slot, rows, bool(instance.search.offload))
    return instance.known[key]


def _prices(model, slot, rows, offloads):
    range_K2 = rows[:, :2].astype(np.int64)
    if not len(rows):
        return Prices(range_K2=range_K2, **dict.fromkeys(("steady_K", "boundary_K", "peak_K", "host_K"), np.empty(0)))
    start_K, end_K, recomputed_K, zero_K = rows[:, :4].T.astype(np.int64)
    candidates = StageCandidates(start_K=start_K, end_K=end_K, checkpointed_K=recomputed_K, zero_stage_K=zero_K)
    if offloads:
        ratios = dict(zip((f"{name}_K" for name in OFFLOADED), rows[:, 4:].T, strict=True))
        candidates = replace(candidates, offload=OffloadCandidates(**ratios))
    costs = model.evaluate(slot, candidates)
    phases = stage_phases(slot.stage_index, slot.num_stages, slot.num_microbatches, slot.schedule)
    return Prices(
        range_K2=range_K2,
        steady_K=costs.steady_K,
        boundary_K=costs.boundary_K,
        peak_K=costs.needs.peaks(phases),
        host_K=host_bytes(model.memory(slot), slot, candidates, costs.needs, phases),
    )


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


def options_of(instance, count, stages, index, kind, *, reduced):
    """By range of layers: what a stage may be; and how many candidates there are."""
    prices = priced(instance, count, stages, index, kind)
    found = {}
    for start, end in np.unique(prices.range_K2, axis=0).tolist():
        here_K = (prices.range_K2 == (start, end)).all(axis=1)
        allowed_K = here_K & (prices.host_K <= instance.host_limit)
        fit_J = np.flatnonzero(allowed_K & (prices.peak_K <= instance.limit))
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
    for count, stages, arrangements in pipelines(instance):
        known = {}
        for index, kind in itertools.product(range(stages), {kind for row in arrangements for kind in row}):
            known[index, kind], priced_here = options_of(instance, count, stages, index, kind, reduced=reduced)
            candidates += priced_here
        for row, cuts in itertools.product(arrangements, itertools.combinations(range(1, layers), stages - 1)):
            edges = (0, *cuts, layers)
            chosen = [known[index, kind][edges[index], edges[index + 1]] for index, kind in enumerate(row)]
            plans += int(np.prod([item.count for item in chosen]))
            peak = min(peak, max(item.peak for item in chosen))
            best = min(best, together(chosen, count))
    return Best(seconds=best, peak=peak, plans=plans, candidates=candidates)


def size_of(instance):
    """Stage candidates of an instance."""
    return sum(
        len(candidates_of(instance, stages, index, kind))
        for _, stages, arrangements in pipelines(instance)
        for index, kind in itertools.product(range(stages), {kind for row in arrangements for kind in row})
    )


def random_instance(seed):
    """A network, a machine, a batch, a space and a memory limit that mostly binds, and sometimes cannot be met."""
    rng = np.random.default_rng(seed)
    while True:
        found = _random_instance(rng)
        if size_of(found) <= MOST_CANDIDATES:
            return _limited(found, rng)


def _random_instance(rng):
    network, kind = _network(rng), str(rng.choice(["cpu", "cuda"]))
    devices = int(rng.choice([1, 2, 3, 4], p=[0.08, 0.32, 0.2, 0.4]))
    nodes = 2 if devices in (2, 4) and rng.random() < 0.3 else 1
    machine = cluster(devices, nodes=nodes, kind=kind)
    splits = [item for item in ((2, False), (2, True), (4, False)) if rng.random() < 0.4]
    if kind == "cpu" or rng.random() < 0.5:
        splits = splits[:1]
    rates = profile(
        flops_per_second=10 ** rng.uniform(9, 11.5), link=10 ** rng.uniform(6, 10), latency=10 ** rng.uniform(-6, -3)
    )
    levels = tuple(sorted({int(level) for level in rng.integers(0, 4, size=int(rng.integers(1, 4)))}))
    copies = {f"{way}_bytes_per_second": 10 ** rng.uniform(6, 10) for way in ("host_to_device", "device_to_host")}
    rates = replace(rates, **copies, host_bytes_per_second_per_node=float(rng.choice([0.0, 1e8])))
    rows = int(rng.choice([1, 2, 4]))
    offload, ratios = _offload(rng)
    return Instance(
        network=with_splits(network, *splits) if splits else network,
        machine=machine,
        rates=rates,
        rows=rows,
        memory_limit=10**15,
        search=SearchSpace(
            zero_stages=levels,
            checkpointing=bool(rng.random() < 0.8),
            num_stages=None if rng.random() < 0.8 else (int(rng.integers(1, devices + 1)),),
            offload=offload,
            offload_ratios=ratios,
            schedules=("1f1b",),
        ),
    )


def _offload(rng):
    """Kinds of state that may be offloaded, and shares; the more kinds the fewer shares."""
    if rng.random() >= OFFLOADING:
        return (), (0.0, 1.0)
    kinds = tuple(name for name in OFFLOADED if rng.random() < 0.5)
    return kinds, (0.0, 0.5, 1.0) if len(kinds) < 3 else (0.0, 0.6)


def _network(rng):
    layers = int(rng.choice([0, 1, 2, 3, 4, 5, 6], p=[0.03, 0.07, 0.15, 0.2, 0.2, 0.2, 0.15]))
    unlike = layers > 1 and rng.random() < 0.4
    kinds = tuple(int(kind) for kind in rng.integers(0, 2, size=layers)) if unlike else (0,) * layers
    widths = tuple(int(4 * 10 ** rng.uniform(1.5, 5)) for _ in range(2))
    return spec(
        layers,
        kinds=kinds,
        widths=widths,
        parameter_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        edge_bytes=int(400 * 10 ** rng.uniform(0, 3)),
        tied=bool(rng.random() < 0.3) and layers > 0,
        measured=bool(rng.random() < 0.5),
    )


def _limited(question, rng):
    """The question with a limit between what the least and the most demanding stages need, or a little below."""
    peaks = [
        priced(question, count, stages, index, kind).peak_K
        for count, stages, arrangements in pipelines(question)
        for index, kind in itertools.product(range(stages), {kind for row in arrangements for kind in row})
    ]
    if not peaks:
        return question
    peak_K = np.sort(np.concatenate(peaks))
    share = 1.0 if question.machine.device.kind == "cpu" else USABLE_MEMORY
    host = None
    if question.search.offload and rng.random() < 0.5:
        host = int(10 ** rng.uniform(3, 6.5)) * question.machine.devices_per_node
    wanted = peak_K[int(rng.random() * (len(peak_K) - 1))] * rng.choice([0.6, 1.0, 1.02, 1.3])
    return replace(question, memory_limit=max(1, int(wanted / share)), host_memory_limit=host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the planner's answer compares.

    Attributes:
        wanted: What trying everything finds.
        seconds: The planner's least seconds by the closed form; infinite if it found no plan.
        bound: What it says that no plan goes below.
        status: Its status, or ``"infeasible"``.
        message: What it says where there is no plan.
    """

    wanted: Best
    seconds: float
    bound: float
    status: str
    message: str = ""

    @property
    def difference(self):
        """Relative difference of the seconds; infinite if only one of the two found a plan."""
        if self.seconds == self.wanted.seconds:
            return 0.0
        return abs(self.seconds / self.wanted.seconds - 1) if np.isfinite(self.wanted.seconds) else np.inf


def asked_before(instance):
    """A planner that has been asked with other memory and another batch."""
    planner = instance.planner()
    for other in (replace(instance, memory_limit=2 * instance.memory_limit), replace(instance, rows=2 * instance.rows)):
        with suppress(InfeasibleError):
            other.tune(planner)
    return planner


def verdict_of(instance, planner=None):
    """Ask the planner, and try everything.

    Args:
        instance: The question.
        planner: The planner to ask; by default a new one.
    """
    wanted = by_trying_everything(instance)
    try:
        found = instance.tune(planner)
    except InfeasibleError as error:
        return Verdict(wanted=wanted, seconds=np.inf, bound=np.inf, status="infeasible", message=str(error))
    return Verdict(wanted=wanted, seconds=found.bound / (1 - found.gap), bound=found.bound, status=found.status)
