"""The space that the paper's planner searches for its example, priced by the paper's rules; for tests only.

GPT 1.3B on two L4, under ZeRO-1. The rules are those of the published artifact (github.com/Dazz993/Mist at d69e530,
``mist/analyzer`` and ``mist/tuning``); :mod:`tests.cost.paper_time` has those of a stage without offload, and
:mod:`tests.cost.test_paper_memory` those of a stage that has everything.
"""

import itertools
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from lightning_mist.tuner.candidates.choices import non_dominated
from lightning_mist.tuner.inter_stage.exact_solver import solve
from lightning_mist.tuner.inter_stage.flow_program import solve_program
from lightning_mist.tuner.inter_stage.problem import InterStageProblem
from tests.cost import paper_time
from tests.cost import test_paper_memory as paper_memory
from tests.cost.paper_time import BLOCK_PARAMETERS, EDGE_PARAMETERS, HALF_BYTES, HEAD, TAIL
from tests.cost.test_paper_memory import GPT
from tests.tuner.problems import slot

BATCH, DEVICES = 32, 2
USABLE_SHARE = 0.88
ROWS = (1, 2, 4, 8)
"""Rows of a microbatch; the artifact has 8 in the plan to beat and 1, 2 and 4 in its search."""

NOTHING = (0.0, 0.0, 0.0, 0.0)
HALVES, QUARTERS = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)
RATIOS = tuple(
    (parameters, gradients, optimizer, activations)
    for parameters, gradients in itertools.product(HALVES, HALVES)
    if gradients or not parameters  # The artifact leaves out moved weights whose gradients stay.
    for optimizer, activations in itertools.product(QUARTERS, QUARTERS)
)
"""Offloaded shares of parameters, gradients, optimizer state and activations."""

PUBLISHED = {"rows": (1, 2, 4), "all_ratios": (NOTHING,), "spread": 2}
"""Limits of the space in which the artifact finds its plan."""

PUBLISHED_SECONDS = 9.26892465
"""Of that plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A stage before its layers are chosen."""

    index: int
    stages: int
    rows: int

    @property
    def devices(self):
        return DEVICES // self.stages

    @property
    def microbatches(self):
        return BATCH // (self.rows * self.devices)

    @property
    def has_head(self):
        return self.index == 0

    @property
    def has_tail(self):
        return self.index == self.stages - 1

    @property
    def in_flight_before(self):
        return min(self.stages - self.index - 1, self.microbatches - 1)


@lru_cache(maxsize=1)
def figures():
    return paper_time.read()


def copy_seconds(direction, size):
    """A copy between host and device; nothing if there is nothing to copy."""
    rate = figures()["copies"][direction]
    return size / 2**30 / rate["gib_per_s"] + rate["latency_s"] if size else 0.0


class Blocks:
    """Seconds of the blocks of a stage with some offload: neighbours' transfers run beside each block's computation.

    A forward fetches the next block and drains the one before; a backward the other way round. Recomputed blocks are
    the last ones. ``edge`` says whether these are the first forward and the last backward of a batch, in which blocks
    are updated, given out and reduced.
    """

    def __init__(self, place, ratios, *, edge):
        self.place, self.edge = place, edge
        self.parameters, self.gradients, self.optimizer, self.activations = ratios
        self.block = _block_seconds(place.rows)
        self.add = paper_time.accumulation_seconds(BLOCK_PARAMETERS, place.microbatches)
        self.half = HALF_BYTES * BLOCK_PARAMETERS
        self.saved = tuple(self.activations * size for size in _saved(place.rows))
        self._known = {}

    def _together(self, **loads):
        key = tuple(sorted(loads.items()))
        if key not in self._known:
            self._known[key] = paper_time.together(loads, figures()["slowdown"])
        return self._known[key]

    def forward_in(self):
        state = self.optimizer * 6 * self.half / self.place.devices + self.gradients * self.half if self.edge else 0.0
        gather = paper_time.gather_seconds(BLOCK_PARAMETERS, self.place.devices) if self.edge else 0.0
        return {"h2d": copy_seconds("h2d", self.parameters * self.half + state), "gpu_gpu": gather}

    def forward_out(self, kind):
        state = self.optimizer * 6 * self.half / self.place.devices + self.parameters * self.half if self.edge else 0.0
        return {"d2h": copy_seconds("d2h", self.saved[kind] + state)}

    def backward_in(self, kind):
        return {"h2d": copy_seconds("h2d", (self.parameters + self.gradients) * self.half + self.saved[kind])}

    def backward_out(self):
        scatter = paper_time.scatter_seconds(BLOCK_PARAMETERS, self.place.devices) if self.edge else 0.0
        return {"d2h": copy_seconds("d2h", self.gradients * self.half), "gpu_gpu": scatter}

    def forward(self, layers_K, recomputed_K):
        """Seconds of all blocks, with what stands alone before the first and behind the last."""
        plain_K = layers_K - recomputed_K
        compute, fetch = {"compute": self.block.forward}, self.forward_in()
        drains = [self._together(**compute, **fetch, **self.forward_out(kind)) for kind in (0, 1)]
        last = [self._together(**compute, **self.forward_out(kind)) for kind in (0, 1)]
        middle_K = np.maximum(layers_K - 2, 0)
        plain_middle_K = np.minimum(plain_K, middle_K)
        seconds_K = plain_middle_K * drains[0] + (middle_K - plain_middle_K) * drains[1]
        seconds_K = seconds_K + np.where(layers_K > 1, self._together(**compute, **fetch), self.block.forward)
        seconds_K += np.where(layers_K > 1, np.where(recomputed_K >= 2, last[1], last[0]), 0.0)
        alone_K = np.where(recomputed_K >= 1, self.forward_out(1)["d2h"], self.forward_out(0)["d2h"])
        return seconds_K + self._together(**fetch) + alone_K

    def backward(self, layers_K, recomputed_K):
        """The same of backwards, and what stands alone before the first of them, which the tail's backward hides."""
        plain_K = layers_K - recomputed_K
        computes = [self.block.backward + self.add, self.block.backward + self.add + self.block.forward]
        out = self.backward_out()

        def one(kind, below, *, drains=True):
            fetch = self.backward_in(below) if below is not None else {}
            return self._together(compute=computes[kind], **fetch, **(out if drains else {}))

        # Of blocks 1 to L-2: not recomputed, recomputed above one that is not, recomputed above one that is.
        same_K = np.clip(np.minimum(plain_K - 1, layers_K - 2), 0, None)
        step_K = ((plain_K >= 1) & (plain_K <= layers_K - 2)).astype(np.int64)
        again_K = np.maximum(layers_K - 2, 0) - same_K - step_K
        seconds_K = same_K * one(0, 0) + step_K * one(1, 0) + again_K * one(1, 1)
        top_K = np.select(
            [layers_K == 1, recomputed_K >= 2, recomputed_K == 1],
            [np.where(recomputed_K == 1, computes[1], computes[0]), one(1, 1, drains=False), one(1, 0, drains=False)],
            one(0, 0, drains=False),
        )
        bottom_K = np.where(plain_K == 0, one(1, None), one(0, None))
        alone_K = np.where(recomputed_K >= 1, self.backward_in(1)["h2d"], self.backward_in(0)["h2d"])
        return seconds_K + top_K + np.where(layers_K > 1, bottom_K, 0.0) + self._together(**out), alone_K


@cache
def _block_seconds(rows):
    return paper_time.block_seconds(rows, flash=False)


@cache
def _part_seconds(names, rows):
    return paper_time.part_seconds(names, rows)


def _saved(rows):
    """Bytes that a block keeps for backward, and that a recomputed one keeps."""
    plan = paper_memory.Plan(microbatch=rows, data_parallel=1, checkpointed=0)
    return paper_memory.full_layer(GPT, plan), paper_memory.activation(GPT, plan)


def seconds(place, ratios, layers_K, recomputed_K):
    """Steady and boundary time."""
    usual, edge = (Blocks(place, ratios, edge=is_edge) for is_edge in (False, True))
    found = []
    for blocks in (usual, edge):
        backward_K, alone_K = blocks.backward(layers_K, recomputed_K)
        tail = _part_seconds(TAIL, place.rows)
        add = paper_time.accumulation_seconds(EDGE_PARAMETERS, place.microbatches)
        total_K = blocks.forward(layers_K, recomputed_K) + backward_K
        if place.has_tail:
            total_K += tail.forward + np.maximum(tail.backward + add, alone_K)
        else:
            total_K += alone_K
        if place.has_head:
            head = _part_seconds(HEAD, place.rows)
            total_K += head.forward + head.backward + add
        found.append(total_K)
    boundary_K = found[1] - found[0]
    if place.has_head and place.devices > 1:
        boundary_K += paper_time.gather_seconds(EDGE_PARAMETERS, place.devices)
        boundary_K += paper_time.scatter_seconds(EDGE_PARAMETERS, place.devices)
    return found[0], boundary_K


def peaks(place, ratios, layers_K, recomputed_K):
    """Peak bytes with what the artifact adds for fragmentation.

    The published peaks do not show what the forward of a block takes on top of what is kept; here it is what a block
    keeps, which is less than its backward takes.
    """
    parameters, gradients, optimizer, activations = ratios
    plan = paper_memory.Plan(microbatch=place.rows, data_parallel=place.devices, checkpointed=0)
    half, states = HALF_BYTES * BLOCK_PARAMETERS, 6 * HALF_BYTES * BLOCK_PARAMETERS / place.devices
    whole = HALF_BYTES * EDGE_PARAMETERS  # Both stages have an edge, which is larger than a block.
    buffers = 2 * whole * ((parameters > 0) + (gradients > 0))
    resident, state = half * (2 - parameters - gradients), states * (1 - optimizer)
    working = 3 * paper_memory.FULL * GPT.matrices / place.devices
    ends = (place.has_head + place.has_tail) * paper_memory.states(GPT.table, plan)
    full, few = _saved(place.rows)
    plain_K = layers_K - recomputed_K
    before_K = place.in_flight_before * (recomputed_K * few + plain_K * full)
    # Of the block in hand everything counts as its peak: one that is not recomputed, if there is one.
    here_K = np.where(plain_K > 0, recomputed_K * few + (plain_K - 1) * full, (layers_K - 1) * few)
    moving_K = activations * np.where(plain_K > 0, full, few)
    kept_K = (1 - activations) * (before_K + here_K) + moving_K
    output = paper_memory.activation(GPT, plan)
    common_K = buffers + ends + kept_K + paper_memory.scores(GPT, plan)
    last_keeps_K = (1 - activations) * np.where(plain_K > 0, full, few)
    handed = 0 if place.has_tail else 2 * place.in_flight_before * output
    inside_K = np.full(len(layers_K), float(full))
    if place.has_tail:
        inside_K = np.maximum(inside_K, last_keeps_K + paper_memory.loss_peak(GPT, plan))
    forward_K = common_K + layers_K * resident + (layers_K - 1) * state + working + handed + inside_K
    handed = output if place.has_tail else handed + 2 * output
    backward_K = common_K + layers_K * (resident + state) + handed + paper_memory.backward_peak(GPT, plan)
    share = 1 + 0.025 * (parameters > 0) + 0.025 * (gradients > 0) + 0.03 * (optimizer > 0) + 0.04 * (activations > 0)
    share += 0.01 * (place.rows >= 4) + 0.025 * (place.stages > 1)
    return np.maximum(forward_K, backward_K) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Choices of one stage: layers, recomputed layers, ratios, steady and boundary seconds."""

    layers_K: np.ndarray
    recomputed_K: np.ndarray
    ratios_KO: np.ndarray
    steady_K: np.ndarray
    boundary_K: np.ndarray

    def take(self, index):
        return Stages(**{name: getattr(self, name)[index] for name in self.__slots__})


def stages(place, *, all_ratios, spread):
    """Everything that fits, of which none is dominated by another with as many layers.

    Args:
        place: The stage.
        all_ratios: The offloaded shares to look at.
        spread: How many layers more or less than an even share it may have.
    """
    even = GPT.layers // place.stages
    lengths = range(max(1, even - spread), min(GPT.layers - place.stages + 1, even + spread) + 1)
    if place.stages == 1:
        lengths = [GPT.layers]
    grid = [(layers, recomputed) for layers in lengths for recomputed in range(layers + 1)]
    # The artifact's memory rules are wrong for one layer that is kept behind others that are recomputed.
    grid = [(layers, again) for layers, again in grid if not (place.has_tail and again == layers - 1)]
    layers_J, recomputed_J = np.array(grid).T
    limit = USABLE_SHARE * figures()["memory_gib"] * 2**30
    parts = []
    for ratios in all_ratios:
        fits_J = peaks(place, ratios, layers_J, recomputed_J) <= limit
        layers_K, recomputed_K = layers_J[fits_J], recomputed_J[fits_J]
        steady_K, boundary_K = seconds(place, ratios, layers_K, recomputed_K)
        parts.append((layers_K, recomputed_K, np.tile(ratios, (len(layers_K), 1)), steady_K, boundary_K))
    found = Stages(**dict(zip(Stages.__slots__, map(np.concatenate, zip(*parts, strict=True)), strict=True)))
    return found.take(non_dominated(found.layers_K, found.steady_K, found.boundary_K))


def pipelines(*, rows=ROWS, all_ratios=RATIOS, spread=GPT.layers):
    """The stages of every pipeline, by its number of microbatches."""
    for count, each in itertools.product((1, 2), rows):
        places = [Place(index=index, stages=count, rows=each) for index in range(count)]
        yield places[0].microbatches, tuple(stages(item, all_ratios=all_ratios, spread=spread) for item in places)


def problem_of(count, options):
    """How to choose the stages of one pipeline."""
    slots = []
    for index, item in enumerate(options):
        start_K = 0 * item.layers_K if index == 0 else GPT.layers - item.layers_K
        devices_K = np.full(len(start_K), DEVICES // len(options))
        slots.append(slot(start_K, item.layers_K, devices_K, item.steady_K, item.boundary_K))
    return InterStageProblem(num_layers=GPT.layers, num_devices=(DEVICES,), num_microbatches=count, slots=tuple(slots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best plan by the dynamic program.

    Attributes:
        seconds: Of its step.
        bound: No plan of any pipeline takes fewer.
        checked: Seconds of the best plan by HiGHS.
        microbatches: Their number.
        stages: Layers, recomputed layers and offloaded shares of each.
    """

    seconds: float
    bound: float
    checked: float
    microbatches: int
    stages: tuple[tuple[int, int, tuple[float, ...]], ...]


def tuned(**limits):
    """The best plan of the space with the limits of :func:`pipelines`, and what is proven of it."""
    best, bound = None, np.inf
    for count, options in pipelines(**limits):
        problem = problem_of(count, options)
        answer = solve(problem)
        bound = min(bound, answer.bound)
        if best is None or answer.objective < best[0].objective:
            best = answer, problem, options
    answer, problem, options = best
    checked = solve_program(problem, time_limit=5.0, incumbent=answer)
    return Tuned(
        seconds=float(answer.objective),
        bound=float(min(bound, checked.bound)),
        checked=float(checked.objective),
        microbatches=problem.num_microbatches,
        stages=tuple(
            (int(item.layers_K[at]), int(item.recomputed_K[at]), tuple(item.ratios_KO[at].tolist()))
            for item, at in zip(options, answer.chosen, strict=True)
        ),
    )
