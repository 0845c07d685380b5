"""Runs of layers at one place of a pipeline: all that their floors need and no limit of memory changes.

It is worked out once, for the runs that are fast enough where nothing is moved; see :mod:`lightning_mist.tuner.floors`.

Array axes
    K  runs; see :mod:`lightning_mist.tuner.least_runs`
    R  runs that are fast enough at the place, by devices and layers
    V  numbers of devices and layers
    X, C  as there
    N  on one node, on several
    W  pairs of weights, of a forward and of a backward; see :mod:`lightning_mist.tuner.load_weights`
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_mist.cost.inputs import FloatArray, IntArray
from lightning_mist.cost.memory import BUFFERS
from lightning_mist.cost.time import CopyRates
from lightning_mist.tuner.least_runs import PLACES, LeastRuns
from lightning_mist.tuner.load_weights import COMPUTE, NETWORK, TO_DEVICE, TO_HOST

_WEIGHTED = (
    (TO_HOST, TO_DEVICE),
    (COMPUTE, COMPUTE),
    (TO_HOST, COMPUTE),
    (COMPUTE, TO_DEVICE),
    (TO_DEVICE, TO_DEVICE),
    (NETWORK, NETWORK),
    (TO_HOST, NETWORK),
)
"""What weights of a forward and of a backward favour. The first are those that mostly say most of copies; the first
four are all of copies or computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What stages may move to host memory.

    Attributes:
        kinds: Kinds of state that may be in host memory, at least one.
        rates: How fast devices copy.
        num_microbatches: Microbatches per batch.
    """

    kinds: frozenset[str]
    rates: CopyRates
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What runs of layers may move to host memory, and what that takes.

    Attributes:
        kinds: Kinds of state that may be in host memory.
        whole_R: Bytes of activations that can be freed of every microbatch in flight but the own one.
        own_R: Bytes of them that can be freed of the own one.
        free_gradients_R: Bytes of gradients that can be freed.
        free_parameters_R: Bytes of parameters that can be freed.
        activations_WR: Weighted seconds of copying all activations of a microbatch.
        gradients_WR: Weighted seconds per byte of gradients that is freed.
        parameters_WR: Weighted seconds per byte of parameters that is freed.
    """

    kinds: frozenset[str]
    whole_R: FloatArray
    own_R: FloatArray
    free_gradients_R: FloatArray
    free_parameters_R: FloatArray
    activations_WR: FloatArray
    gradients_WR: FloatArray
    parameters_WR: FloatArray

    @property
    def is_any(self) -> bool:
        """Whether there is anything that frees bytes."""
        return bool(self.kinds & {"activations", "gradients", "parameters"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRuns:
    """Runs of layers at one place of a pipeline that are fast enough there, and all that no limit changes.

    All seconds are those of a microbatch with its transfers.

    Attributes:
        pace: The most seconds of a microbatch.
        place: Index in :data:`~lightning_mist.tuner.least_runs.PLACES`.
        run_R: Which of all runs they are.
        layers_V: Layers.
        devices_V: Devices.
        begins_V: The first run of each.
        cell_R: Which of them a run has.
        steady_R: Seconds where nothing is moved.
        reach_R: The same with what is exposed at the boundaries.
        needed_R: Bytes without gradients; if optimizer state may be moved, without what that frees.
        gradients_R: Bytes of gradients.
        saved_R: Bytes that every other microbatch adds.
        loads_WR: Weighted seconds of what is not copied.
        copies: What else may be moved, if anything may.
    """

    pace: float
    place: int
    run_R: IntArray
    layers_V: IntArray
    devices_V: IntArray
    begins_V: IntArray
    cell_R: IntArray
    steady_R: FloatArray
    reach_R: FloatArray
    needed_R: FloatArray
    gradients_R: FloatArray
    saved_R: FloatArray
    loads_WR: FloatArray
    copies: Copies | None = None

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.cell_R)

    @property
    def is_first(self) -> bool:
        """Whether the head is with them."""
        return self.place == PLACES.index("first")

    @property
    def is_last(self) -> bool:
        """Whether the tail is with them."""
        return self.place == PLACES.index("last")


def placed_runs(runs: LeastRuns, place: str, pace: float) -> PlacedRuns:
    """The runs that are fast enough at a place, if nothing may be moved.

    Args:
        runs: Runs of layers.
        place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
        pace: The most seconds of a microbatch.
    """
    at = PLACES.index(place)
    transfer_K = runs.arrival_K * (place != "first") + runs.return_K * (place != "last")
    busy_K = runs.forward_XK[at] + runs.backward_XK[at] + transfer_K
    run_R = runs.order_K[(busy_K <= pace)[runs.order_K]]
    loads_WR = _loads(runs, at, run_R) + transfer_K[run_R]
    steady_R = np.maximum(busy_K[run_R], loads_WR.max(axis=0))
    kept_R = np.flatnonzero(steady_R <= pace)
    run_R, steady_R, loads_WR = run_R[kept_R], steady_R[kept_R], np.take(loads_WR, kept_R, axis=1)
    reach_R = runs.forward_XK[at][run_R] + _last(runs, at, run_R) + transfer_K[run_R]
    begins_V = np.flatnonzero(np.diff(runs.cell_K[run_R], prepend=-1))
    held_K = runs.always_K + runs.parameters_XK[at] + runs.working_XK[at] + runs.optimizer_XK[at]
    return PlacedRuns(
        pace=pace,
        place=at,
        run_R=run_R,
        layers_V=runs.layers_K[run_R[begins_V]],
        devices_V=runs.devices_K[run_R[begins_V]],
        begins_V=begins_V,
        cell_R=np.repeat(np.arange(len(begins_V)), np.diff(begins_V, append=len(run_R))),
        steady_R=steady_R,
        reach_R=np.maximum(steady_R, reach_R),
        needed_R=held_K[run_R],
        gradients_R=runs.gradients_XK[at][run_R],
        saved_R=runs.saved_K[run_R],
        loads_WR=loads_WR,
    )


def _loads(runs: LeastRuns, place: int, run_R: IntArray) -> FloatArray:
    """Weighted seconds of computing and communicating, as far as they have to be between transfers."""
    forward_NWC, backward_NWC = _weights(runs)
    weights = [forward_NWC[..., COMPUTE], backward_NWC[..., COMPUTE]]
    weights += [forward_NWC[..., NETWORK], backward_NWC[..., NETWORK]]
    seconds = [runs.forward_XK[place], runs.backward_XK[place], runs.forward_network_K, runs.backward_network_K]
    loads_WR = _weighted(runs, run_R, weights, [values_K[run_R] for values_K in seconds])
    loads_WR -= runs.outer_K[run_R]
    return loads_WR


def _last(runs: LeastRuns, place: int, run_R: IntArray) -> FloatArray:
    """Seconds of the last backward with what averages gradients beside it."""
    backward_R, reduce_R = runs.backward_XK[place][run_R], runs.reduce_XK[place][run_R]
    _, backward_NWC = _weights(runs)
    weights = [backward_NWC[..., COMPUTE], backward_NWC[..., NETWORK]]
    beside_WR = _weighted(runs, run_R, weights, [backward_R, reduce_R])
    last_R: FloatArray = np.maximum(np.maximum(backward_R, reduce_R), beside_WR.max(axis=0))
    return last_R


def with_copies(placed: PlacedRuns, runs: LeastRuns, moves: Moves) -> PlacedRuns:
    """Runs at a place with what they may move.

    Args:
        placed: The runs.
        runs: All runs.
        moves: What they may move.
    """
    at, run_R = placed.place, placed.run_R
    # The head or the tail is a unit of its own.
    free_R = np.maximum(0.0, 1 - BUFFERS / (runs.layers_K[run_R] + (placed.is_first or placed.is_last)))
    whole_R = runs.whole_K[run_R]
    own_R = np.maximum(whole_R - (0.0 if placed.is_last else runs.top_two_K[run_R]), 0.0)
    parameters_R, may = runs.parameters_XK[at][run_R] * free_R, moves.kinds.__contains__
    copies = Copies(
        kinds=moves.kinds,
        whole_R=whole_R * may("activations"),
        own_R=own_R * may("activations"),
        free_gradients_R=placed.gradients_R * free_R * may("gradients"),
        free_parameters_R=parameters_R * may("parameters"),
        **_prices(placed, runs, moves, free_R),
    )
    freed_R = runs.optimizer_XK[at][run_R] * free_R * may("optimizer")
    return replace(placed, needed_R=placed.needed_R - freed_R, copies=copies)


def _prices(placed: PlacedRuns, runs: LeastRuns, moves: Moves, free_R: FloatArray) -> dict[str, FloatArray]:
    """Weighted seconds of moving every kind of state, of activations all, of the others a byte that is freed."""
    run_R, rates = placed.run_R, moves.rates
    to_device, to_host = 1 / rates.to_device, 1 / rates.to_host
    forward_NWC, backward_NWC = _weights(runs)
    alone_NW = np.ones(forward_NWC.shape[:2])
    # Behind the last layer of a stage without the tail nothing is computed.
    whole_R, told_R = runs.whole_K[run_R], runs.copies_K[run_R]
    alone_R = np.minimum(runs.top_K[run_R], whole_R) * (not placed.is_last)
    around_NW = forward_NWC[..., TO_HOST] * to_host + backward_NWC[..., TO_DEVICE] * to_device
    weights = [around_NW, (to_host + to_device) * alone_NW]
    found = {"activations_WR": _weighted(runs, run_R, weights, [told_R * (whole_R - alone_R), told_R * alone_R])}
    # Of layers that are alike one is the first and one the last, around which nothing is computed either.
    is_middle = not placed.is_first and not placed.is_last
    share_R = 1 / runs.layers_K[run_R] if runs.is_alike and is_middle else np.zeros(len(run_R))
    # What frees nothing has no price.
    per_byte_R = np.where(free_R > 0, told_R / np.where(free_R > 0, free_R, 1.0), 0.0)
    beside = [per_byte_R * (1 - share_R), per_byte_R * share_R]
    fetched = to_device * (moves.num_microbatches > 1)
    gradients_NW = fetched * backward_NWC[..., TO_DEVICE] + to_host * backward_NWC[..., TO_HOST]
    found["gradients_WR"] = _weighted(runs, run_R, [gradients_NW, (fetched + to_host) * alone_NW], beside)
    parameters_NW = to_device * (forward_NWC[..., TO_DEVICE] + backward_NWC[..., TO_DEVICE])
    found["parameters_WR"] = _weighted(runs, run_R, [parameters_NW, 2 * to_device * alone_NW], beside)
    return {name: values_WR if name[:-3] in moves.kinds else 0.0 * values_WR for name, values_WR in found.items()}


def _weights(runs: LeastRuns) -> tuple[FloatArray, FloatArray]:
    """Weights of a forward and of a backward, with axes ``NWC``."""
    first, then = (list(favoured) for favoured in zip(*_WEIGHTED, strict=True))
    return runs.weights_NWC[:, first], runs.weights_NWC[:, then]


def _weighted(
    runs: LeastRuns, run_R: IntArray, weights: Sequence[FloatArray], values: Sequence[FloatArray]
) -> FloatArray:
    """The sum of some values of runs, each weighted; weights have axes ``NW``."""
    values_FR, weights_NWF = np.stack(values), np.stack(weights, axis=-1)
    weights_WF: FloatArray = weights_NWF[0]
    if (weights_NWF[0] != weights_NWF[1]).any():
        across_R = runs.across_K[run_R].astype(np.float64)
        weights_WF = np.concatenate([weights_NWF[0], weights_NWF[1]], axis=1)
        values_FR = np.concatenate([values_FR * (1 - across_R), values_FR * across_R])
    found_WR: FloatArray = weights_WF @ values_FR
    return found_WR
