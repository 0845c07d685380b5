"""What a stage takes at least where it has to fit, from what runs of layers take and hold at least.

What is counted of its memory is what is there around a backward: parameters, optimizer state and gradients, what the
other microbatches in flight keep, and the own one's working set. What does not fit has to be moved to host memory in
the cheapest way that there could be. To free a byte

* by *activations*, a microbatch's are copied away beside a forward and back beside a backward; as many are freed as
  microbatches are in flight, but for the last two layers' of the own one. Those of the last layer of a stage without
  the tail are copied while nothing else is done;
* by *gradients*, they are fetched and written back in every backward;
* by *parameters*, they are fetched in every forward and backward.

Of each of the latter two, and of optimizer state, two buffers stay on the device, each as large as the largest part of
any unit: of what ``n`` units move, ``2 / n`` at least. Copies of optimizer state count for nothing.

All loads of a forward together take at least what their weights say (:mod:`lightning_mist.tuner.load_weights`), and so
do those of a backward; both may be weighted differently, each in every way.

Array axes
    K  runs; see :mod:`lightning_mist.tuner.least_runs`
    M  runs that have to move something
    I  kinds of state that may be moved: activations, gradients, parameters
    J  runs, at their best number of recomputed layers
    X, W, C  as there
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.channels import CopyRates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.offload import BUFFERS
from lightning_mist.cost.phases import Phase
from lightning_mist.tuner.choices import ANYWHERE, SlotChoices
from lightning_mist.tuner.least_runs import PLACES, LeastRuns
from lightning_mist.tuner.load_weights import COMPUTE, NETWORK, TO_DEVICE, TO_HOST
from lightning_mist.tuner.search_space import OFFLOADED

_MOVED = ("activations", "gradients", "parameters")

_WEIGHTED = (
    (COMPUTE, COMPUTE),
    (TO_HOST, COMPUTE),
    (COMPUTE, TO_DEVICE),
    (TO_HOST, TO_DEVICE),
    (TO_DEVICE, TO_DEVICE),
    (NETWORK, NETWORK),
    (TO_HOST, NETWORK),
)
"""What weights of a forward and of a backward favour."""

_NEXT_TO_NOTHING = 1e-9
"""Share of the bytes that have to be freed which is less than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What stages may use.

    Attributes:
        memory_limit: Bytes of a device.
        kinds: Kinds of state that may be in host memory.
        rates: How fast devices copy; not asked for where nothing may be moved.
        num_microbatches: Microbatches per batch.
    """

    memory_limit: float
    kinds: frozenset[str]
    rates: CopyRates | None
    num_microbatches: int


def floor_choices(runs: LeastRuns, room: Room, place: str, phases: Sequence[Phase]) -> SlotChoices:
    """Choices of a slot of which none that there is takes less, by layers and devices.

    Args:
        runs: Runs of layers.
        room: What they may use.
        place: A name of :data:`~lightning_mist.tuner.least_runs.PLACES`.
        phases: The situations of the slot.
    """
    return _Stage(runs, room, PLACES.index(place), phases).choices()


class _Stage:
    """All runs of layers at one place of a pipeline."""

    def __init__(self, runs: LeastRuns, room: Room, place: int, phases: Sequence[Phase]) -> None:
        self.runs, self.room, self.place = runs, room, place
        # Gradients are there in all backwards but the first.
        backwards = [phase.others for phase in phases if phase.kind == "backward"]
        self.has_gradients = bool(backwards)
        self.others = max(backwards or [phase.others for phase in phases if phase.kind == "first backward"])
        self.forward_K, self.backward_K = runs.forward_XK[place], runs.backward_XK[place]
        is_first, is_last = place == PLACES.index("first"), place == PLACES.index("last")
        self.transfer_K = runs.arrival_K * (not is_first) + runs.return_K * (not is_last)
        # The head or the tail is a unit of its own.
        units_K = runs.layers_K + (is_first or is_last)
        self.free_K = np.maximum(0.0, 1 - BUFFERS / units_K)

    def choices(self) -> SlotChoices:
        """The least seconds over all numbers of recomputed layers."""
        runs = self.runs
        steady_K, last_K = self._unmoved()
        excess_K = self._excess()
        at_M = np.flatnonzero((excess_K > 0) & (steady_K + self.transfer_K <= runs.pace))
        fits_K = excess_K <= 0
        if len(at_M) and self.room.kinds & set(_MOVED):
            moved_M = self._moved(at_M, excess_K[at_M])
            steady_K[at_M], fits_K[at_M] = np.maximum(steady_K[at_M], moved_M), moved_M < np.inf
        steady_K = np.where(fits_K, steady_K, np.inf)
        reach_K = np.maximum(steady_K, self.forward_K + last_K) + self.transfer_K
        steady_J, reach_J = (
            np.minimum.reduceat(values_K, runs.begins_J) for values_K in (steady_K + self.transfer_K, reach_K)
        )
        fast_J = (steady_J <= runs.pace) & (steady_J < np.inf)
        index_J, steady_J, reach_J = runs.begins_J[fast_J], steady_J[fast_J], reach_J[fast_J]
        none_J = np.zeros(len(index_J), dtype=np.int64)
        return SlotChoices(
            start_K=none_J + ANYWHERE,
            layers_K=runs.layers_K[index_J],
            devices_K=runs.devices_K[index_J],
            part_K=none_J,
            steady_K=steady_J,
            boundary_K=reach_J - steady_J,
            peak_K=none_J.astype(np.float64),
            checkpointed_K=none_J,
            zero_stage_K=none_J,
            tensor_K=none_J + 1,
            sequence_K=none_J,
            offload_KO=np.zeros((len(index_J), len(OFFLOADED))),
        )

    def _unmoved(self) -> tuple[FloatArray, FloatArray]:
        """Seconds of a microbatch without transfers, and of the last backward with what averages gradients beside it.

        Copies make neither shorter.
        """
        runs, reduce_K = self.runs, self.runs.reduce_XK[self.place]
        steady_K, last_K = self.forward_K + self.backward_K, np.maximum(self.backward_K, reduce_K)
        for forward_CK, backward_CK in self._weights(slice(None)):
            loads_K = self._loads(forward_CK, backward_CK, slice(None))
            steady_K = np.maximum(steady_K, loads_K - runs.outer_K)
            beside_K = backward_CK[COMPUTE] * self.backward_K + backward_CK[NETWORK] * reduce_K
            last_K = np.maximum(last_K, beside_K)
        return steady_K, last_K

    def _weights(self, at: IntArray | slice) -> list[tuple[FloatArray, FloatArray]]:
        return [(self.runs.weights_WCK[first][:, at], self.runs.weights_WCK[then][:, at]) for first, then in _WEIGHTED]

    def _loads(self, forward_CK: FloatArray, backward_CK: FloatArray, at: IntArray | slice) -> FloatArray:
        """Weighted seconds of computing and communicating."""
        runs = self.runs
        loads_K: FloatArray = forward_CK[COMPUTE] * self.forward_K[at] + backward_CK[COMPUTE] * self.backward_K[at]
        loads_K += forward_CK[NETWORK] * runs.forward_network_K[at]
        loads_K += backward_CK[NETWORK] * runs.backward_network_K[at]
        return loads_K

    def _excess(self) -> FloatArray:
        """Bytes that are too many if only optimizer state is moved."""
        runs, place = self.runs, self.place
        stays_K = 1 - self.free_K if "optimizer" in self.room.kinds else 1.0
        needed_K = runs.always_K + runs.parameters_XK[place] + runs.optimizer_XK[place] * stays_K
        needed_K = needed_K + runs.gradients_XK[place] * self.has_gradients
        needed_K += self.others * runs.saved_K + runs.working_XK[place]
        excess_K: FloatArray = needed_K - self.room.memory_limit
        return excess_K

    def _moved(self, at_M: IntArray, excess_M: FloatArray) -> FloatArray:
        """Seconds of a microbatch without transfers where something has to be moved; infinite if that is not enough."""
        runs, place = self.runs, self.place
        own_M = runs.whole_K[at_M] - (0.0 if place == PLACES.index("last") else runs.top_two_K[at_M])
        freed_IM = np.stack(
            [
                self.others * runs.whole_K[at_M] + np.maximum(own_M, 0.0),
                runs.gradients_XK[place][at_M] * self.has_gradients * self.free_K[at_M],
                runs.parameters_XK[place][at_M] * self.free_K[at_M],
            ]
        )
        freed_IM *= np.array([name in self.room.kinds for name in _MOVED])[:, None]
        found_M = np.zeros(len(at_M))
        for forward_CM, backward_CM in self._weights(at_M):
            copies_M = _cheapest(self._prices(forward_CM, backward_CM, freed_IM, at_M), freed_IM, excess_M)
            loads_M = self._loads(forward_CM, backward_CM, at_M)
            found_M = np.maximum(found_M, loads_M + copies_M * runs.copies_K[at_M] - runs.outer_K[at_M])
        is_enough_M = freed_IM.sum(axis=0) >= excess_M * (1 - _NEXT_TO_NOTHING)
        return np.where(is_enough_M, found_M, np.inf)

    def _prices(
        self, forward_CM: FloatArray, backward_CM: FloatArray, freed_IM: FloatArray, at_M: IntArray
    ) -> FloatArray:
        """Weighted seconds per byte that is freed, of every kind of state."""
        runs, rates = self.runs, self.room.rates
        assert rates is not None
        to_device, to_host = 1 / rates.to_device, 1 / rates.to_host
        whole_M = runs.whole_K[at_M]
        # Behind the last layer of a stage without the tail nothing is computed.
        alone_M = np.minimum(runs.top_K[at_M], whole_M) * (self.place != PLACES.index("last"))
        away, back = forward_CM[TO_HOST] * to_host, backward_CM[TO_DEVICE] * to_device
        activations_M = (away + back) * (whole_M - alone_M) + (to_host + to_device) * alone_M
        # Of layers that are alike one is the first and one the last, around which nothing is computed either.
        share_M = 1 / runs.layers_K[at_M] if runs.is_alike and self.place == PLACES.index("middle") else 0.0

        def beside(weight_M: FloatArray) -> FloatArray:
            found_M: FloatArray = weight_M * (1 - share_M) + share_M
            return found_M

        fetched = to_device * (self.room.num_microbatches > 1)
        gradients_M = fetched * beside(backward_CM[TO_DEVICE]) + to_host * beside(backward_CM[TO_HOST])
        parameters_M = to_device * (beside(forward_CM[TO_DEVICE]) + beside(backward_CM[TO_DEVICE]))
        free_M = np.maximum(self.free_K[at_M], np.finfo(float).tiny)
        freed_M = np.maximum(freed_IM[0], np.finfo(float).tiny)
        with np.errstate(over="ignore"):
            return np.stack([activations_M / freed_M, gradients_M / free_M, parameters_M / free_M])


def _cheapest(price_IM: FloatArray, freed_IM: FloatArray, excess_M: FloatArray) -> FloatArray:
    """Weighted seconds of freeing enough bytes, the cheapest kinds first."""
    order_IM = np.argsort(price_IM, axis=0)
    price_IM, freed_IM = (np.take_along_axis(values_IM, order_IM, axis=0) for values_IM in (price_IM, freed_IM))
    # What the kinds before leave to each.
    left_IM = np.maximum(excess_M - (np.cumsum(freed_IM, axis=0) - freed_IM), 0.0)
    taken_IM = np.minimum(left_IM, freed_IM)
    seconds_M: FloatArray = (np.where(taken_IM > 0, price_IM, 0.0) * taken_IM).sum(axis=0)
    return seconds_M
