"""The rules by which the paper's planner predicts the seconds of a step; for tests only.

They are stated here as found in the published artifact (github.com/Dazz993/Mist at d69e530, ``mist/analyzer``), to show
that its figures are understood: our own model counts what they leave out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("data") / "paper_l4.json"

LONGEST_BACKWARD = 2.3
"""A backward that took longer than this many forwards is taken to be twice the forward."""

SHORTEST_FORWARD, SHORTEST_BACKWARD = 50e-6, 100e-6
"""Operators below either are left out."""

REDUCE_SCATTER = 1.1
"""Seconds of a reduce-scatter over those of an all-gather."""

BLOCK = ("linear 2048 to 6144", "linear 2048 to 2048", "linear 2048 to 8192", "gelu", "linear 8192 to 2048")
ATTENTION = {False: ("scores", "softmax", "values"), True: ("flash attention",)}
TWICE = ("layer norm", "residual add")
HEAD, TAIL = ("embedding",), ("linear 2048 to 50304", "cross entropy")

BLOCK_PARAMETERS, EDGE_PARAMETERS = 50_339_840, 103_022_592
"""Of a block, and of the embedding as of the head: there is no table of positions."""

HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Forward and backward of a part."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperStage:
    """One stage: layers, how many of them are recomputed, and whether head and tail belong to it."""

    layers: int
    recomputed: int
    has_head: bool
    has_tail: bool


def read() -> Mapping[str, object]:
    """The figures of an L4."""
    found: Mapping[str, object] = json.loads(DATA.read_text())
    return found


def _kept(forward: float, backward: float) -> Seconds | None:
    backward = 2 * forward if backward > LONGEST_BACKWARD * forward else backward
    if forward < SHORTEST_FORWARD or backward < SHORTEST_BACKWARD:
        return None
    return Seconds(forward=forward, backward=backward)


def part_seconds(names: Sequence[str], rows: int) -> Seconds:
    """Sum over the operators of a part, after the rules above."""
    times = {(item["operator"], item["rows"]): item for item in read()["operators"]}
    found = [_kept(times[name, rows]["forward"], times[name, rows]["backward"]) for name in names]
    kept = [item for item in found if item is not None]
    return Seconds(forward=sum(item.forward for item in kept), backward=sum(item.backward for item in kept))


def accumulation_seconds(parameters: int, microbatches: int) -> float:
    """Adding up gradients, averaged over the microbatches: the first of them adds to nothing."""
    times = {item["operator"]: item["forward"] for item in read()["operators"]}
    return times[f"accumulate {parameters}"] * (microbatches - 1) / microbatches


def block_seconds(rows: int, *, flash: bool) -> Seconds:
    """A block."""
    return part_seconds((*BLOCK, *ATTENTION[flash], *TWICE, *TWICE), rows)


def gather_seconds(parameters: int, devices: int) -> float:
    """An all-gather of half-precision values; nothing on one device."""
    if devices == 1:
        return 0.0
    link = read()["all_gather"]
    assert link["devices"] == devices
    return parameters * HALF_BYTES / 2**30 / link["gib_per_s"] * (devices - 1) / devices + link["latency_s"]


def scatter_seconds(parameters: int, devices: int) -> float:
    """A reduce-scatter, its latency scaled like its payload."""
    return REDUCE_SCATTER * gather_seconds(parameters, devices)


def together(isolated: Mapping[str, float], slowdown: Mapping[str, Mapping[str, float]]) -> float:
    """Seconds of channels that run at the same time.

    All that are active slow one another down until the first has ended; what is left of the others goes on.
    """
    left, total = {name: value for name, value in isolated.items() if value > 0}, 0.0
    while len(left) > 1:
        factors = slowdown[" and ".join(sorted(left))]
        first = min(left[name] * factors[name] for name in left)
        total += first
        left = {name: left[name] - first / factors[name] for name in left}
        left = {name: value for name, value in left.items() if value > 1e-15}
    return total + sum(left.values())


def stage_seconds(stage: PaperStage, *, rows: int, devices: int, microbatches: int, flash: bool) -> tuple[float, float]:
    """Steady time ``t`` and boundary time ``d`` under ZeRO-1 without offload."""
    block = block_seconds(rows, flash=flash)
    add_block = accumulation_seconds(BLOCK_PARAMETERS, microbatches)
    add_edge = accumulation_seconds(EDGE_PARAMETERS, microbatches)
    steady = stage.layers * (block.forward + block.backward + add_block) + stage.recomputed * block.forward
    boundary = 0.0
    for names, there in ((HEAD, stage.has_head), (TAIL, stage.has_tail)):
        if there:
            part = part_seconds(names, rows)
            steady += part.forward + part.backward + add_edge
    if devices > 1:
        gather, scatter = gather_seconds(BLOCK_PARAMETERS, devices), scatter_seconds(BLOCK_PARAMETERS, devices)
        slowdown = read()["slowdown"]
        backward = block.backward + add_block + block.forward * (stage.recomputed == stage.layers)
        assert stage.recomputed in (0, stage.layers), "a mix needs the layers one by one"
        # Every block but one hides its neighbour's collective; the outermost ones are exposed.
        hidden = together({"compute": block.forward, "gpu_gpu": gather}, slowdown) - block.forward
        hidden += together({"compute": backward, "gpu_gpu": scatter}, slowdown) - backward
        boundary += (stage.layers - 1) * hidden + gather + scatter
        if stage.has_head:
            boundary += gather_seconds(EDGE_PARAMETERS, devices) + scatter_seconds(EDGE_PARAMETERS, devices)
    return steady, boundary


def step_seconds(stages: Sequence[PaperStage], *, rows: int, devices: int, microbatches: int, flash: bool) -> float:
    """The paper's objective: ``(G-1) max t + sum t + max(0, max_i(d_i - sum_{j<i} t_j))``."""
    times = [
        stage_seconds(stage, rows=rows, devices=devices, microbatches=microbatches, flash=flash) for stage in stages
    ]
    steady = [t for t, _ in times]
    late = max(d - sum(steady[:index]) for index, (_, d) in enumerate(times))
    return (microbatches - 1) * max(steady) + sum(steady) + max(0.0, late)
