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

from dataclasses import dataclass, field

import numpy as np

from lightning_mist.cost.channels import CopyRates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload import BUFFERS
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
"""What weights of a forward and of a backward favour. The first are those that mostly say most of copies."""

_SPARE = 0.78
"""Share of the pace that is known below which runs are worth leaving out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What stages may move to host memory.

    Attributes:
        kinds: Kinds of state that may be in host memory.
        rates: How fast devices copy; not asked for where nothing may be moved.
        num_microbatches: Microbatches per batch.
    """

    kinds: frozenset[str]
    rates: CopyRates | None
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRuns:
    """Runs of layers at one place of a pipeline that are fast enough there, and all that no limit changes.

    All seconds are those of a microbatch with its transfers.

    Attributes:
        pace: The most seconds of a microbatch.
        kinds: Kinds of state that may be in host memory.
        layers_V: Layers.
        devices_V: Devices.
        begins_V: The first run of each.
        cell_R: Which of them a run has.
        steady_R: Seconds where nothing is moved.
        reach_R: The same with what is exposed at the boundaries.
        needed_R: Bytes without gradients, if only optimizer state is moved.
        gradients_R: Bytes of gradients.
        saved_R: Bytes that every other microbatch adds.
        whole_R: Bytes of activations that can be freed of every other microbatch.
        own_R: Bytes of them that can be freed of the own one.
        free_gradients_R: Bytes of gradients that can be freed.
        free_parameters_R: Bytes of parameters that can be freed.
        loads_WR: Weighted seconds of what is not copied.
        activations_WR: Weighted seconds of copying all activations of a microbatch.
        gradients_WR: Weighted seconds per byte of gradients.
        parameters_WR: Weighted seconds per byte of parameters.
    """

    pace: float
    kinds: frozenset[str]
    layers_V: IntArray
    devices_V: IntArray
    begins_V: IntArray
    cell_R: IntArray
    steady_R: FloatArray
    reach_R: FloatArray
    needed_R: FloatArray
    gradients_R: FloatArray
    saved_R: FloatArray
    whole_R: FloatArray
    own_R: FloatArray
    free_gradients_R: FloatArray
    free_parameters_R: FloatArray
    loads_WR: FloatArray
    activations_WR: FloatArray
    gradients_WR: FloatArray
    parameters_WR: FloatArray

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.cell_R)


@dataclass(slots=True, kw_only=True)
class KnownRuns:
    """Runs of layers, and what is known of them at each place; it grows.

    Attributes:
        runs: The runs.
        placed: Those at every place, by what may be moved.
    """

    runs: LeastRuns
    placed: dict[tuple[str, frozenset[str]], PlacedRuns] = field(default_factory=dict)

    def at(self, place: str, moves: Moves, pace: float) -> PlacedRuns:
        """The runs that are fast enough at a place.

        Args:
            place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
            moves: What they may move; of every number of microbatches at the same rates.
            pace: The most seconds of a microbatch.
        """
        key = place, moves.kinds
        known = self.placed.get(key)
        if known is None or not _SPARE * known.pace <= pace <= known.pace:
            most = self.runs.pace if pace >= _SPARE * self.runs.pace else pace
            known = self.placed[key] = placed_runs(self.runs, moves, place, max(pace, most))
        return known


def placed_runs(runs: LeastRuns, moves: Moves, place: str, pace: float) -> PlacedRuns:
    """The runs that are fast enough at a place.

    Args:
        runs: Runs of layers.
        moves: What they may move.
        place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
        pace: The most seconds of a microbatch.
    """
    return _Placing(runs, moves, PLACES.index(place)).placed(pace)


class _Placing:
    """All runs of layers at one place of a pipeline."""

    def __init__(self, runs: LeastRuns, moves: Moves, place: int) -> None:
        self.runs, self.moves, self.place = runs, moves, place
        self.is_first, self.is_last = place == PLACES.index("first"), place == PLACES.index("last")

    def placed(self, pace: float) -> PlacedRuns:
        """What limits do not change."""
        runs, place = self.runs, self.place
        transfer_K = runs.arrival_K * (not self.is_first) + runs.return_K * (not self.is_last)
        busy_K = runs.forward_XK[place] + runs.backward_XK[place] + transfer_K
        at_R = np.flatnonzero(busy_K <= pace)
        # By layers and devices.
        key_R = runs.devices_K[at_R] * (int(runs.layers_K.max(initial=0)) + 1) + runs.layers_K[at_R]
        order_R = np.argsort(key_R, kind="stable")
        at_R, key_R = at_R[order_R], key_R[order_R]
        forward_WCR, backward_WCR = self._weights(at_R)
        steady_R, last_R = busy_K[at_R], self._last(at_R, backward_WCR)
        loads_WR = self._loads(at_R, forward_WCR, backward_WCR) + transfer_K[at_R]
        steady_R = np.maximum(steady_R, loads_WR.max(axis=0))
        kept_R = steady_R <= pace
        at_R, key_R, steady_R, last_R = at_R[kept_R], key_R[kept_R], steady_R[kept_R], last_R[kept_R]
        reach_R = np.maximum(steady_R, runs.forward_XK[place][at_R] + last_R + transfer_K[at_R])
        begins_V = np.flatnonzero(np.diff(key_R, prepend=-1))
        free_R = self._free(at_R)
        stays_R = 1 - free_R if "optimizer" in self.moves.kinds else 1.0
        needed_R = runs.always_K[at_R] + runs.parameters_XK[place][at_R] + runs.working_XK[place][at_R]
        own_R = runs.whole_K[at_R] - (0.0 if self.is_last else runs.top_two_K[at_R])
        forward_WCR, backward_WCR = forward_WCR[:, :, kept_R], backward_WCR[:, :, kept_R]
        return PlacedRuns(
            pace=pace,
            kinds=self.moves.kinds,
            layers_V=runs.layers_K[at_R[begins_V]],
            devices_V=runs.devices_K[at_R[begins_V]],
            begins_V=begins_V,
            cell_R=np.repeat(np.arange(len(begins_V)), np.diff(begins_V, append=len(at_R))),
            steady_R=steady_R,
            reach_R=reach_R,
            needed_R=needed_R + runs.optimizer_XK[place][at_R] * stays_R,
            gradients_R=runs.gradients_XK[place][at_R],
            saved_R=runs.saved_K[at_R],
            whole_R=runs.whole_K[at_R] * self._may_move("activations"),
            own_R=np.maximum(own_R, 0.0) * self._may_move("activations"),
            free_gradients_R=runs.gradients_XK[place][at_R] * free_R * self._may_move("gradients"),
            free_parameters_R=runs.parameters_XK[place][at_R] * free_R * self._may_move("parameters"),
            loads_WR=loads_WR[:, kept_R],
            **self._prices(at_R, forward_WCR, backward_WCR, free_R),
        )

    def _may_move(self, name: str) -> bool:
        return name in self.moves.kinds

    def _free(self, at_R: IntArray) -> FloatArray:
        """What part of the state that is moved leaves the device."""
        # The head or the tail is a unit of its own.
        units_R = self.runs.layers_K[at_R] + (self.is_first or self.is_last)
        free_R: FloatArray = np.maximum(0.0, 1 - BUFFERS / units_R)
        return free_R

    def _weights(self, at_R: IntArray) -> tuple[FloatArray, FloatArray]:
        """Weights of a forward and of a backward, with axes ``WCR``."""
        tables = self.runs.weights_NWC.transpose(1, 2, 0)
        across_R = self.runs.across_K[at_R]
        first, then = (tables[list(favoured)][:, :, across_R] for favoured in zip(*_WEIGHTED, strict=True))
        return first, then

    def _loads(self, at_R: IntArray, forward_WCR: FloatArray, backward_WCR: FloatArray) -> FloatArray:
        """Weighted seconds of computing and communicating, as far as they have to be between transfers."""
        runs, place = self.runs, self.place
        loads_WR: FloatArray = forward_WCR[:, COMPUTE] * runs.forward_XK[place][at_R]
        loads_WR += backward_WCR[:, COMPUTE] * runs.backward_XK[place][at_R]
        loads_WR += forward_WCR[:, NETWORK] * runs.forward_network_K[at_R]
        loads_WR += backward_WCR[:, NETWORK] * runs.backward_network_K[at_R]
        loads_WR -= runs.outer_K[at_R]
        return loads_WR

    def _last(self, at_R: IntArray, backward_WCR: FloatArray) -> FloatArray:
        """Seconds of the last backward with what averages gradients beside it."""
        backward_R, reduce_R = self.runs.backward_XK[self.place][at_R], self.runs.reduce_XK[self.place][at_R]
        beside_WR = backward_WCR[:, COMPUTE] * backward_R + backward_WCR[:, NETWORK] * reduce_R
        last_R: FloatArray = np.maximum(np.maximum(backward_R, reduce_R), beside_WR.max(axis=0))
        return last_R

    def _prices(
        self, at_R: IntArray, forward_WCR: FloatArray, backward_WCR: FloatArray, free_R: FloatArray
    ) -> dict[str, FloatArray]:
        """Weighted seconds of moving every kind of state, of activations all, of the others a byte that is freed."""
        runs, rates = self.runs, self.moves.rates
        if rates is None:
            none_WR = np.zeros((len(_WEIGHTED), len(at_R)))
            return {"activations_WR": none_WR, "gradients_WR": none_WR, "parameters_WR": none_WR}
        to_device, to_host = 1 / rates.to_device, 1 / rates.to_host
        whole_R = runs.whole_K[at_R]
        # Behind the last layer of a stage without the tail nothing is computed.
        alone_R = np.minimum(runs.top_K[at_R], whole_R) * (not self.is_last)
        around_WR = forward_WCR[:, TO_HOST] * to_host + backward_WCR[:, TO_DEVICE] * to_device
        activations_WR = around_WR * (whole_R - alone_R) + (to_host + to_device) * alone_R
        # Of layers that are alike one is the first and one the last, around which nothing is computed either.
        is_middle = not self.is_first and not self.is_last
        share_R = 1 / runs.layers_K[at_R] if runs.is_alike and is_middle else np.zeros(len(at_R))

        def beside(weight_WR: FloatArray) -> FloatArray:
            found_WR: FloatArray = weight_WR * (1 - share_R) + share_R
            return found_WR

        fetched = to_device * (self.moves.num_microbatches > 1)
        gradients_WR = fetched * beside(backward_WCR[:, TO_DEVICE]) + to_host * beside(backward_WCR[:, TO_HOST])
        parameters_WR = to_device * (beside(forward_WCR[:, TO_DEVICE]) + beside(backward_WCR[:, TO_DEVICE]))
        # What frees nothing has no price.
        told_R = runs.copies_K[at_R]
        per_byte_R = np.where(free_R > 0, told_R / np.where(free_R > 0, free_R, 1.0), 0.0)
        return {
            "activations_WR": activations_WR * told_R * self._may_move("activations"),
            "gradients_WR": gradients_WR * per_byte_R * self._may_move("gradients"),
            "parameters_WR": parameters_WR * per_byte_R * self._may_move("parameters"),
        }
