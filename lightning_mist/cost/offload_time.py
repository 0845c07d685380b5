"""Seconds of stages that keep a part of their state in host memory.

What is where is said in :mod:`lightning_mist.cost.offload`; here is when it moves. A stage goes through its units
(head, layers, tail), and beside each of them its four channels are busy with what the unit needs and with what its
neighbours do. With ``C`` the channels' concurrent seconds (:mod:`lightning_mist.cost.overlap`) of loads to compute, to
exchange, to copy to the device and to the host, the unit ``r`` of a stage ``[low, high)`` takes

    forward        C(f_r, u_{r+1}, p_{r+1}, a_{r-1})
    first forward  C(f_r + o_{r+1}, u_{r+1} + e_{r+1}, p'_{r+1} + s_{r+2}, a_{r-1} + w_r)
    backward       C(b_r, u_{r-1} + g_{r+1}, p_{r-1} + q_r + a_{r-1}, z_r)
    last backward  the same with the averaging m_{r+1} of gradients beside it

where what lies outside the stage is nothing, and

    f, b  computing forward and backward, of recomputed layers with another forward; o the update
    u, g  unsharding parameters (ZeRO-3), reducing gradients in every microbatch (from ZeRO-2 on)
    m, e  averaging gradients after the last microbatch, giving out updated parameters (up to ZeRO-2)
    p     fetching moved parameters, p' those that are not trained;  q, z  fetching moved gradients, writing them back
    a     moving activations away behind a layer, and back ahead of its backward
    s, w  fetching what an update needs (state, gradients, parameters), writing back what it changed

Under ZeRO-3 the rank that has parameters gives them out when they have arrived, and computes nothing until then: there
``p`` is beside nothing. At the ends there is nothing to hide behind: a forward begins with ``u`` of its first unit and
ends when ``a`` of its last has gone, a backward begins with ``u + a`` of its last unit and ends when ``g`` (``m``) of
its first has gone. Parameters of the two outermost units stay where a backward follows a forward, or a forward a
backward: they are fetched in the first forward of a batch only. Gradients leave behind their unit's backward, but
nobody waits for them until the unit after the next needs their room: ``z`` counts beside the unit itself, and that of
the first unit not at all.

If parameters, gradients or optimizer state are moved, the update of a batch happens unit by unit in the first forward
of the next: ``s`` and ``p'`` of the first unit come first, then its update, beside which the second unit's ``s`` comes.
No more is on the device then than in a backward at the same unit: activations of the units before it, gradients of
those behind it. Where code of the user's may look at gradients or state, the update is behind the last backward,

    update         C(o_r, 0, s_{r+1}, w_{r-1})

with ``s`` of the first unit before and ``w`` of the last behind it, and the next batch begins with ``p`` of the first
unit. Gradients that the first microbatch makes are fetched like those of others, which is at most too much by one fetch
per batch; with one microbatch there is nothing to fetch.

All of this is what the lists of :mod:`lightning_mist.schedule.units` do on the clock of
:mod:`lightning_mist.schedule.copies`, whose copies are the runtime's.

Array axes
    K  candidates
    U  candidates among them that differ in what a pass depends on
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_mist.cost.candidates import OffloadCandidates, StageCandidates, StageSlot
from lightning_mist.cost.channels import CopyRates
from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.distinct import distinct_codes, distinct_rows
from lightning_mist.cost.memory import MemoryModel
from lightning_mist.cost.offload_loads import Beforehand, CopyPlace, Loads, Moving, WithoutCopies, loads_of
from lightning_mist.cost.offload_passes import Concurrent, Copies, Neighbourhoods, Passes, Way
from lightning_mist.cost.offload_ranks import ratios_of
from lightning_mist.cost.overlap import beyond_computing, concurrent_seconds
from lightning_mist.cost.regions import covered
from lightning_mist.hardware import Interference
from lightning_mist.model.spec import ModelSpec

AT_ONCE = 1 << 14
"""Stages that are asked about together: enough to be fast, and few enough to take little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySeconds:
    """What host copies do to the seconds of stages; all zero for candidates that move nothing.

    Attributes:
        copies_K: What they add to a middle microbatch.
        forward_copies_K: The part of it that belongs to the forward.
        update_copies_K: What they add to the update.
        gather_K: Giving out updated parameters, as far as it does not hide in the first forward.
        reduce_K: What averaging gradients takes more (or less) because copies run beside the last backward too.
        is_deferred_K: Whether the update happens in the first forward, so that ``gather_K`` applies.
    """

    copies_K: FloatArray
    forward_copies_K: FloatArray
    update_copies_K: FloatArray
    gather_K: FloatArray
    reduce_K: FloatArray
    is_deferred_K: BoolArray


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyQuestion:
    """Stages that may offload, at one place.

    Attributes:
        memory: The network, or one tensor-parallel rank's part of it.
        slot: Their place.
        candidates: The stages.
        known: Their seconds without copies.
        across_nodes: Whether the ranks that share parameters are in several nodes.
    """

    memory: MemoryModel
    slot: StageSlot
    candidates: StageCandidates
    known: WithoutCopies
    across_nodes: bool


def copy_seconds(
    questions: Sequence[CopyQuestion], rates: CopyRates, interference: Interference | None
) -> tuple[CopySeconds, ...]:
    """Seconds of host copies of each question's stages; what takes long is asked once for the stages of all.

    Args:
        questions: The stages.
        rates: Bytes per second of copies.
        interference: How channels slow each other down; ``None`` where they take turns.
    """
    found = [no_copies(len(question.candidates)) for question in questions]
    moved = [_moves(question.candidates) for question in questions]
    for across in (False, True):
        asked = [index for index, item in enumerate(questions) if item.across_nodes == across and len(moved[index])]
        for members in _at_once(asked, moved):
            terms = moving_seconds(_joined(members, questions, moved), rates, interference, across_nodes=across)
            first = 0
            for index in members:
                cut = slice(first, first + len(moved[index]))
                found[index] = _spread(len(questions[index].candidates), moved[index], terms, cut)
                first = cut.stop
    return tuple(found)


def _moves(candidates: StageCandidates) -> IntArray:
    """Which candidates move anything."""
    ratios = candidates.offload
    if ratios is None:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(ratios.is_updated_by_units_K | (ratios.activations_K > 0))


def _at_once(asked: Sequence[int], moved: Sequence[IntArray]) -> Iterator[list[int]]:
    """Questions that are asked together: not too many stages."""
    some: list[int] = []
    for index in asked:
        if some and sum(len(moved[other]) for other in (*some, index)) > AT_ONCE:
            yield some
            some = []
        some.append(index)
    if some:
        yield some


def _joined(members: Sequence[int], questions: Sequence[CopyQuestion], moved: Sequence[IntArray]) -> Moving:
    """The stages of several questions that move anything."""
    taken = [(questions[index], moved[index]) for index in members]
    candidates = StageCandidates.joined([item.candidates.take(at_J) for item, at_J in taken])
    before = [
        Beforehand(
            update_K=item.known.update_K[at_J], reduce_K=item.known.reduce_K[at_J], gather_K=item.known.gather_K[at_J]
        )
        for item, at_J in taken
    ]
    places = [
        CopyPlace(memory=item.memory, slot=item.slot, compute=item.known.compute, units=item.known.units)
        for item, _ in taken
    ]
    place_K = np.repeat(np.arange(len(taken)), [len(at_J) for _, at_J in taken])
    return Moving(places=places, place_K=place_K, candidates=candidates, before=Beforehand.joined(before))


def _spread(count: int, at_J: IntArray, terms: CopySeconds, cut: slice) -> CopySeconds:
    """Seconds of some of so many candidates, those of the others nothing."""
    found = {}
    for name in CopySeconds.__slots__:
        values_J = getattr(terms, name)[cut]
        found[name] = values_J if len(at_J) == count else np.zeros(count, dtype=values_J.dtype)
        if len(at_J) < count:
            found[name][at_J] = values_J
    return CopySeconds(**found)


def every_moving_seconds(
    moving: Moving, rates: CopyRates, interference: Interference | None, across_S: BoolArray
) -> CopySeconds:
    """As :func:`moving_seconds`, wherever the stages are.

    Args:
        moving: The stages.
        rates: Bytes per second of copies.
        interference: How channels slow each other down; ``None`` where they take turns.
        across_S: Of each place, whether the ranks that share parameters are in several nodes.
    """
    across_K = across_S[moving.place_K]
    found: CopySeconds | None = None
    for across in (False, True):
        at_J = np.flatnonzero(across_K == across)
        for begin in range(0, len(at_J), AT_ONCE):
            some_J = at_J[begin : begin + AT_ONCE]
            if len(some_J) == len(across_K):
                return moving_seconds(moving, rates, interference, across_nodes=across)
            terms = moving_seconds(moving.take(some_J), rates, interference, across_nodes=across)
            found = no_copies(len(across_K)) if found is None else found
            for name in CopySeconds.__slots__:
                getattr(found, name)[some_J] = getattr(terms, name)
    return no_copies(0) if found is None else found


def moving_seconds(
    moving: Moving, rates: CopyRates, interference: Interference | None, *, across_nodes: bool
) -> CopySeconds:
    """Seconds of host copies of stages each of which moves something.

    Args:
        moving: The stages.
        rates: Bytes per second of copies.
        interference: How channels slow each other down; ``None`` where they take turns.
        across_nodes: Whether the ranks that share parameters are in several nodes, everywhere or nowhere.
    """
    candidates = moving.candidates
    ratios = ratios_of(candidates)
    is_deferred_K = moving.is_deferred_K
    loads, question_K = loads_of(moving, rates)

    def concurrent(compute: FloatArray, network: FloatArray, copies: Copies | None) -> FloatArray:
        if copies is None:
            return compute + beyond_computing(compute, network, interference, across_nodes)
        return concurrent_seconds(compute, network, *copies, interference, across_nodes)

    around = _Around(
        spec=moving.places[0].memory.spec,
        kinds=Neighbourhoods.of(loads),
        place_K=moving.place_K,
        is_deferred_K=is_deferred_K,
        before=moving.before,
        concurrent=concurrent,
    )
    terms = _terms(loads, question_K, candidates, ratios, around)
    return CopySeconds(**{f"{name}_K": values_K for name, values_K in terms.items()}, is_deferred_K=is_deferred_K)


def no_copies(count: int) -> CopySeconds:
    """Of candidates that move nothing.

    Args:
        count: How many they are.
    """
    copies_K, forward_K, update_K, gather_K, reduce_K = np.zeros((5, count))
    return CopySeconds(
        copies_K=copies_K,
        forward_copies_K=forward_K,
        update_copies_K=update_K,
        gather_K=gather_K,
        reduce_K=reduce_K,
        is_deferred_K=np.zeros(count, dtype=bool),
    )


def _terms(
    loads: Loads, question_K: IntArray, candidates: StageCandidates, offload: OffloadCandidates, around: "_Around"
) -> dict[str, FloatArray]:
    """The differences between passes with copies and without.

    Most candidates differ only in ratios that not every pass depends on: without copies none does but for whether the
    update is part of it, a middle forward fetches parameters and moves activations, backwards also move gradients.
    """
    stages = around.place_K, candidates.start_K, candidates.end_K, candidates.checkpointed_K, candidates.zero_stage_K
    base_K, parameters_K, gradients_K, activations_K = (
        distinct_rows(*columns)[1]
        for columns in (stages, (offload.parameters_K,), (offload.gradients_K,), (offload.activations_K,))
    )
    forward_K, first_K, backward_K, last_K = around.alone(loads, question_K, candidates, base_K)
    middle = around.passes(loads, question_K, candidates, (base_K, parameters_K, activations_K))
    behind = around.passes(loads, question_K, candidates, (base_K, parameters_K, gradients_K, activations_K))
    whole = around.passes(loads, question_K, candidates, None)
    update_K = around.before.update_K * offload.is_updated_by_units_K
    moving, moving_edge = Way(copies=True, edge=False), Way(copies=True, edge=True)
    moving_forward_K, moving_backward_K = middle.forward(moving), behind.backward(moving)
    forward_copies_K = np.maximum(moving_forward_K - forward_K, 0.0)
    gather_K = np.maximum(first_K - forward_K - update_K, 0.0)
    reduce_K = behind.backward(moving_edge) - moving_backward_K - (last_K - backward_K)
    update_copies_K = whole.forward(moving_edge) - moving_forward_K - update_K - gather_K
    is_eager_K = offload.is_updated_by_units_K & ~around.is_deferred_K
    if is_eager_K.any():
        update_copies_K = np.where(is_eager_K, whole.update() - update_K, update_copies_K)
    return {
        "copies": forward_copies_K + np.maximum(moving_backward_K - backward_K, 0.0),
        "forward_copies": forward_copies_K,
        "update_copies": np.maximum(update_copies_K, 0.0),
        "gather": gather_K,
        "reduce": reduce_K,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What passes of some candidates have in common.

    Attributes:
        spec: The network.
        kinds: Units with different neighbours.
        place_K: At which place each is.
        is_deferred_K: Whether the update is part of a first forward.
        before: What is known of them without copies.
        concurrent: Seconds of loads on the four channels.
    """

    spec: ModelSpec
    kinds: Neighbourhoods
    place_K: IntArray
    is_deferred_K: BoolArray
    before: Beforehand
    concurrent: Concurrent

    def alone(
        self, loads: Loads, question_K: IntArray, candidates: StageCandidates, base_K: IntArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Seconds without copies of a forward, of the first one, of a backward, of the last one.

        Args:
            loads: Seconds of units.
            question_K: Row of the loads that each candidate has.
            candidates: The stages.
            base_K: Which stages are the same but for what they move.
        """
        known_XK = self.before.alone_XK
        if known_XK is not None:
            forward_K, first_K, backward_K, last_K = known_XK
        else:
            plain = self.passes(loads, question_K, candidates, (base_K, self.is_deferred_K.astype(np.int64)))
            still, edge = Way(copies=False, edge=False), Way(copies=False, edge=True)
            forward_K, first_K = plain.forward(still), plain.forward(edge)
            backward_K, last_K = plain.backward(still), plain.backward(edge)
        return forward_K, np.where(self.is_deferred_K, first_K, forward_K), backward_K, last_K

    def passes(
        self,
        loads: Loads,
        question_K: IntArray,
        candidates: StageCandidates,
        columns: tuple[IntArray, ...] | None,
    ) -> "_Shared":
        """Passes that depend on some columns only, each evaluated once; on everything if there are none.

        Args:
            loads: Seconds of units.
            question_K: Row of the loads that each candidate has.
            candidates: The stages.
            columns: What the passes depend on.
        """
        of_K = None
        if columns is not None:
            _, of_K = distinct_rows(*columns)
            first_U = np.zeros(int(of_K.max(initial=-1)) + 1, dtype=np.int64)
            # The last assignment stays: backwards, the first candidate of each.
            first_U[of_K[::-1]] = np.arange(len(of_K))[::-1]
            row_V, question_K = distinct_codes(question_K[first_U], len(loads))
            loads, candidates = loads.take(row_V), candidates.take(first_U)
        bounds = covered(self.spec, candidates.start_K, candidates.end_K)
        return _Shared(Passes(loads, question_K, candidates, bounds, self.concurrent, self.kinds), of_K)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Passes of distinct candidates, and which of them each candidate has."""

    distinct: Passes
    of_K: IntArray | None

    def forward(self, way: Way) -> FloatArray:
        """Seconds of one forward."""
        found_U = self.distinct.forward(way)
        return found_U if self.of_K is None else found_U[self.of_K]

    def backward(self, way: Way) -> FloatArray:
        """Seconds of one backward."""
        found_U = self.distinct.backward(way)
        return found_U if self.of_K is None else found_U[self.of_K]

    def update(self) -> FloatArray:
        """Seconds of an update behind the last backward."""
        found_U = self.distinct.update()
        return found_U if self.of_K is None else found_U[self.of_K]
