"""What every unit of a stage that offloads has to compute, exchange and copy, in seconds of each channel.

Bytes are those of :mod:`lightning_mist.cost.memory.offload_bytes`: whole parameters are offloaded, and of what is dealt
out over ranks the rank that has most counts, its bytes spread over the units as all ranks' are. A parameter that
several units use is fetched for each of them.

Array axes
    K  candidates
    J  distinct questions among them: place, ZeRO stage, ratios, and the parts of the rank that has most
    R  units, which are regions; padded in front by one that is empty, and behind by two
    P  parameters
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_mist.cost.inputs import (
    ArrayRecord,
    BoolArray,
    FloatArray,
    IntArray,
    OffloadCandidates,
    StageCandidates,
    StageSlot,
    covered,
    distinct_rows,
    prefix_sums,
)
from lightning_mist.cost.memory import MemoryModel, OffloadedBytes
from lightning_mist.cost.time.overlap import CopyRates
from lightning_mist.cost.time.region_times import RegionSeconds
from lightning_mist.model.spec import ModelSpec
from lightning_mist.plan import ZeroStage

BEFORE, BEHIND = 1, 2
"""Empty units in front of the first and behind the last, so that neighbours always have an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlace:
    """A place in a pipeline, as far as copies depend on it.

    Attributes:
        loads: What units compute and communicate there, as of :func:`unit_loads`.
        across_nodes: Whether the ranks that shard are in several nodes.
    """

    memory: MemoryModel
    slot: StageSlot
    loads: "Loads"
    across_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStages(ArrayRecord):
    """Stages at one place or at several, with those of their seconds that copies depend on.

    Attributes:
        reduce_K: Averaging all gradients after the last microbatch, hidden or not.
        gather_K: Giving out all updated parameters, hidden or not.
    """

    places: Sequence[CopyPlace]
    place_K: IntArray
    candidates: StageCandidates
    update_K: FloatArray
    reduce_K: FloatArray
    gather_K: FloatArray

    @property
    def is_deferred_K(self) -> BoolArray:
        """Whether an update waits for the next batch's first forward."""
        slots = [place.slot for place in self.places]
        deferred_K: BoolArray = defers_K(self.places[0].memory.spec, slots, self.place_K, self.candidates)
        return deferred_K & ratios_of(self.candidates).is_updated_by_units_K

    @classmethod
    def everywhere(cls, items: Sequence["CopyStages"]) -> "CopyStages":
        """The stages of all, at the places of all."""
        places = [place for item in items for place in item.places]
        first = np.cumsum([0, *(len(item.places) for item in items)]).tolist()
        placed = [
            replace(item, places=places, place_K=begin + item.place_K)
            for begin, item in zip(first, items, strict=False)
        ]
        return cls.joined(placed)


@dataclass(frozen=True)
class Loads:
    """Seconds of every unit by question, padded; what a unit does not have is 0.

    ``forward``, ``backward``, ``again``, ``update``
        Computing its forward, its backward, its forward again in backward, and its update.
    ``unshard``, ``scatter``
        Giving out its parameters, and reducing its gradients, in every microbatch.
    ``reduce``, ``gather``
        Averaging its gradients after the last microbatch, and giving out its updated parameters.
    ``parameters_in``, ``frozen_in``, ``gradients_in``, ``gradients_out``
        Fetching its offloaded parameters, those of them that no update fetches, and gradients, and writing these back.
    ``state_in``, ``state_out``
        Fetching what its update needs (optimizer state, gradients and parameters), and writing back what it changed
        (optimizer state and parameters).
    ``saved_in``, ``saved_out``, ``checkpoint_in``, ``checkpoint_out``
        Fetching and moving away the activations of a layer that is not recomputed, and of one that is; with ``last_``
        those of a stage's last layer, whose output is sent.

    Attributes:
        places: Where each is on the first axis.
        seconds_by_name_JR: Them all; axes: what, ``J``, ``R``.
        waits_J: Whether computing waits for parameters that are fetched, to give them out (ZeRO-3); 1 or 0.
    """

    places: Mapping[str, int]
    seconds_by_name_JR: FloatArray
    waits_J: FloatArray

    @classmethod
    def of(cls, seconds: Mapping[str, FloatArray], shape: tuple[int, int], waits_J: FloatArray) -> "Loads":
        """Seconds by name as loads.

        Args:
            seconds: Seconds of every unit, of each question or of all alike.
        """
        found_by_name_JR = np.zeros((len(seconds), shape[0], shape[1] + BEFORE + BEHIND))
        for place, values in enumerate(seconds.values()):
            found_by_name_JR[place, :, BEFORE:-BEHIND] = values
        return cls({name: place for place, name in enumerate(seconds)}, found_by_name_JR, waits_J)

    def __len__(self) -> int:
        """Number of questions."""
        return int(self.seconds_by_name_JR.shape[1])

    def __getitem__(self, name: str) -> FloatArray:
        """Seconds of every unit by question."""
        found_JR: FloatArray = self.seconds_by_name_JR[self.places[name]]
        return found_JR

    @property
    def width(self) -> int:
        """Number of units, those that are made up included."""
        return int(self.seconds_by_name_JR.shape[2])

    def has(self, name: str) -> bool:
        """Whether any unit has a load."""
        return not self._there.isdisjoint({name, name.replace("kept", "saved"), name.replace("kept", "checkpoint")})

    @cached_property
    def _there(self) -> set[str]:
        return {name for name, place in self.places.items() if self.seconds_by_name_JR[place].any()}

    def at(self, name: str, place_K: IntArray, again_K: BoolArray) -> FloatArray:
        """One load at flat places of questions and units; of what is kept that of a layer that is recomputed or not."""
        if "kept" not in name:
            return self[name].reshape(-1).take(place_K)
        saved_K, checkpoint_K = (
            self.at(name.replace("kept", kind), place_K, again_K) for kind in ("saved", "checkpoint")
        )
        return np.where(again_K, checkpoint_K, saved_K)


def unit_loads(compute: RegionSeconds, unshard_R: FloatArray, reduce_JR: FloatArray) -> Loads:
    """What units compute and communicate, beside which nothing is copied.

    Questions are first those of ranks that share nothing in a microbatch, then of ones that share gradients, then of
    ones that share parameters too; each by the row of ``reduce_JR``.
    """
    rows, width = reduce_JR.shape
    shares_J, gives_J = (np.repeat(levels, rows)[:, None].astype(np.float64) for levels in ([0, 1, 1], [0, 0, 1]))
    computed = {"forward": compute.forward_R, "backward": compute.backward_R, "again": compute.recompute_R}
    shared = {"unshard": gives_J * unshard_R, "scatter": shares_J * np.tile(reduce_JR, (3, 1))}
    return Loads.of({**computed, **shared}, (3 * rows, width), np.zeros(3 * rows))


def unit_question(zero_stage_K: IntArray, row_K: IntArray, rows: int) -> IntArray:
    """Which question of :func:`unit_loads` candidates ask, by the rows of reductions that there are."""
    question_K: IntArray = np.maximum(zero_stage_K - ZeroStage.OPTIMIZER, 0) * rows + row_K
    return question_K


def loads_of(stages: CopyStages, rates: CopyRates) -> tuple[Loads, IntArray]:
    """The loads of stages that offload, and which row of them each stage has."""
    candidates = stages.candidates
    offload = ratios_of(candidates)
    memories, memory_of_place = _memories(stages.places)
    low_K, high_K = covered(memories[0].spec, candidates.start_K, candidates.end_K)
    trained_by_memory_R = np.stack([memory.holdings.table.trained_R for memory in memories])
    prefix_by_memory_R, memory_K = prefix_sums(trained_by_memory_R), memory_of_place[stages.place_K]
    trained_K = prefix_by_memory_R[memory_K, high_K] - prefix_by_memory_R[memory_K, low_K]
    # Parameters are given out unit by unit where they are updated beside the first forward.
    update_K = stages.update_K * offload.is_updated_by_units_K
    totals = update_K, stages.reduce_K, stages.gather_K * stages.is_deferred_K
    rows_by_memory_R = np.stack([memory.holdings.table.reduced_row_R for memory in memories])
    columns = (
        stages.place_K,
        rows_by_memory_R[memory_K, low_K],
        candidates.zero_stage_K,
        offload.parameters_K,
        offload.gradients_K,
        offload.optimizer_K,
        *offload.kept_ratios.T,
        *_parts(stages),
        *(total_K / np.maximum(trained_K, 1.0) for total_K in totals),
    )
    questions, question_K = distinct_rows(*columns)
    return _loads(stages.places, questions, rates), question_K


def _loads(places: Sequence[CopyPlace], questions: FloatArray, rates: CopyRates) -> Loads:
    """Seconds of every unit, by distinct questions."""
    memories, memory_of_place = _memories(places)
    (place_J, row_J), columns = questions[:, :2].T.astype(np.int64), questions[:, 2:].T
    memory_J = memory_of_place[place_J]

    def offloaded(ratio_J: FloatArray, of: OffloadedBytes) -> FloatArray:
        """Offloaded bytes of every unit, where every unit fetches what it uses; axes ``J``, ``R``."""
        pairs, pair_J = distinct_rows(memory_J, ratio_J)
        found_by_pair_R = [memories[int(memory)].states.unit_bytes(ratio, of) for memory, ratio in pairs.tolist()]
        return np.stack(found_by_pair_R)[pair_J]

    zero_J, parameters_J, gradients_J, optimizer_J, activations_J, checkpoints_J, *rest = columns
    part_J, gradient_J, owned_J, state_J, update_J, reduce_J, gather_J = (values[:, None] for values in rest)
    # Bytes of every unit that are offloaded, before they are dealt out.
    offloaded_JR = offloaded(parameters_J, "parameters")
    changed_JR = offloaded(parameters_J, "changed")
    optimizer = memories[0].spec.optimizer
    graded_JR = optimizer.gradient_bytes_per_parameter_byte * offloaded(gradients_J, "trained")
    state_JR = state_J * optimizer.state_bytes_per_parameter_byte * offloaded(optimizer_J, "trained")
    trained_JR = np.stack([memory.holdings.table.trained_R for memory in memories])[memory_J]
    costs = [place.memory.costs(place.slot.rows, place.slot.context_parallel_degree) for place in places]
    is_layer_R = np.ones(trained_JR.shape[1])
    is_layer_R[[0, -1]] = 0.0
    kept = {
        "saved": [item.saved_R for item in costs],
        "checkpoint": [item.checkpointed_saved_R for item in costs],
        "last_saved": [item.saved_R - item.handed_R for item in costs],
        "last_checkpoint": [item.checkpointed_saved_R - item.checkpointed_handed_R for item in costs],
    }
    moved = {
        name: ratio_J[:, None] * is_layer_R * np.stack(bytes_by_place_R)[place_J]
        for (name, bytes_by_place_R), ratio_J in zip(kept.items(), (activations_J, checkpoints_J) * 2, strict=True)
    }
    # What the last layer of all hands on is the tail's, and stays.
    for name in ("saved", "checkpoint"):
        moved[name][:, -2] = moved[f"last_{name}"][:, -2]
    # The first microbatch of a batch has no gradients to fetch.
    accumulates_J = np.array([float(place.slot.num_microbatches > 1) for place in places])[place_J, None]
    rows_of_place = np.array([len(place.loads) // 3 for place in places])
    first_of_place, zero_stage_J = 3 * (np.cumsum(rows_of_place) - rows_of_place), zero_J.astype(np.int64)
    units_J = first_of_place[place_J] + unit_question(zero_stage_J, row_J, rows_of_place[place_J])
    units_by_name_JR = np.concatenate([place.loads.seconds_by_name_JR for place in places], axis=1)[:, units_J]
    to_device, to_host = rates.to_device, rates.to_host
    found = {
        **dict(zip(places[0].loads.places, units_by_name_JR[:, :, BEFORE:-BEHIND], strict=True)),
        "update": update_J * trained_JR,
        "reduce": reduce_J * trained_JR,
        "gather": gather_J * trained_JR,
        "parameters_in": part_J * offloaded_JR / to_device,
        "frozen_in": part_J * (offloaded_JR - changed_JR) / to_device,
        "gradients_in": accumulates_J * gradient_J * graded_JR / to_device,
        "gradients_out": gradient_J * graded_JR / to_host,
        "state_in": (state_JR + owned_J * graded_JR + part_J * changed_JR) / to_device,
        "state_out": (state_JR + part_J * changed_JR) / to_host,
    }
    for name, moved_JR in moved.items():
        found |= {f"{name}_in": moved_JR / to_device, f"{name}_out": moved_JR / to_host}
    ranks_J = np.array([place.slot.shard_degree for place in places])[place_J]
    return Loads.of(found, trained_JR.shape, ((zero_J >= ZeroStage.PARAMETERS) & (ranks_J > 1)).astype(np.float64))


def _memories(places: Sequence[CopyPlace]) -> tuple[list[MemoryModel], IntArray]:
    """The distinct memory models of some places, and which each has."""
    found = {memory: index for index, memory in enumerate(dict.fromkeys(place.memory for place in places))}
    return list(found), np.array([found[place.memory] for place in places], dtype=np.int64)


def _parts(stages: CopyStages) -> FloatArray:
    """As :func:`parts_of_ranks`, wherever candidates are."""
    memories, memory_of_place = _memories(stages.places)
    ranks_K = np.array([place.slot.shard_degree for place in stages.places], dtype=np.int64)[stages.place_K]
    parts_K = np.ones((4, len(stages.candidates)))
    for index, memory in enumerate(memories):
        at_J = np.flatnonzero(memory_of_place[stages.place_K] == index)
        parts_K[:, at_J] = parts_of_ranks(memory, ranks_K[at_J], stages.candidates.take(at_J))
    return parts_K


def ratios_of(candidates: StageCandidates) -> OffloadCandidates:
    """The ratios of candidates.

    Raises:
        ValueError: If they have none.
    """
    if candidates.offload is None:
        raise ValueError("candidates.offload = None: nothing is offloaded, so there are no copies")
    return candidates.offload


def defers_K(spec: ModelSpec, slots: Sequence[StageSlot], place_K: IntArray, candidates: StageCandidates) -> BoolArray:
    """Whether stages that update unit by unit do it in the next first forward: nobody may look before.

    As of :func:`lightning_mist.schedule.stage_units.defers_update`.
    """
    rules, zero_K = spec.module_map, candidates.zero_stage_K
    if rules.excludes("sharded_gradients") or rules.excludes("shards"):
        return np.zeros(len(zero_K), dtype=bool)
    is_shared_K = np.array([slot.shard_degree > 1 for slot in slots])[place_K]
    is_given_K = is_shared_K & (zero_K >= ZeroStage.OPTIMIZER) & (zero_K < ZeroStage.PARAMETERS)
    return ~(is_given_K & bool(rules.excludes("sharded_parameters")))


def parts_of_ranks(memory: MemoryModel, ranks_K: IntArray, candidates: StageCandidates) -> FloatArray:
    """What part of a unit's offloaded bytes the rank that has most offloads.

    The update of a parameter happens once, however many units fetch it.

    Returns:
        Of parameters, of gradients, of gradients whose parameters a rank updates, and of optimizer state; axis ``K``.
    """
    offload, states, zero_K = ratios_of(candidates), memory.states, candidates.zero_stage_K
    low_K, high_K = covered(memory.spec, candidates.start_K, candidates.end_K)

    def part(ratio_K: FloatArray, since: ZeroStage, *, trained: bool, once: bool = False) -> FloatArray:
        shards_K, part_K = (zero_K >= since) & (ranks_K > 1), np.ones(len(candidates))
        at_J = np.flatnonzero((shards_K | once) & (ratio_K > 0))
        if not len(at_J):
            return part_K
        some, ratio_J = candidates.take(at_J), ratio_K[at_J]
        most_J = states.of(some, ratio_J, ranks_K[at_J], shards_K[at_J], trained=trained).offloaded_K
        if once:
            ratios, row_J = distinct_rows(ratio_J)
            prefix_by_ratio_R = prefix_sums(
                np.stack([states.unit_bytes(ratio, "trained") for (ratio,) in ratios.tolist()])
            )
            all_J = prefix_by_ratio_R[row_J, high_K[at_J]] - prefix_by_ratio_R[row_J, low_K[at_J]]
        else:
            all_J = states.of(some, ratio_J, 1, shards_K[at_J], trained=trained).offloaded_K
        part_K[at_J] = most_J / np.maximum(all_J, 1.0)
        return part_K

    return np.stack(
        [
            part(offload.parameters_K, ZeroStage.PARAMETERS, trained=False),
            part(offload.gradients_K, ZeroStage.GRADIENTS, trained=True),
            part(offload.gradients_K, ZeroStage.OPTIMIZER, trained=True, once=True),
            part(offload.optimizer_K, ZeroStage.OPTIMIZER, trained=True, once=True),
        ]
    )
