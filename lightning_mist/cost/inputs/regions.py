"""A network as a row of regions, in numbers: what each part needs for a given number of rows.

Array axes
    R  regions in execution order: the head, every layer, the tail (``L + 2`` of them)
    L  layers
    P  parameters
    J  regions at which a stage may begin, as far as they differ
    K  whatever the caller asks about; of work operators of one kind (and size) in one direction of a kind of region

Cuts are ``0 .. L``: cut ``k`` lies before layer ``k``; nothing is sent over cuts 0 and L.

With context parallelism of degree ``c`` a device computes on ``s / c`` tokens of the same rows and with all parameters:
activations and what stages exchange are those of the shorter sequence. The head is computed whole by all of them, and
so is a tail that puts all tokens together. What it holds is traced (:meth:`ModelSpec.on_row_part`). Where it was not,
attention keeps the gathered keys and values of all tokens; gathering them takes one copy of either more, the sums of
their gradients three of either.

A stage of layers ``[start, end)`` covers the regions ``[low, high)`` with ``low = start + 1``, or 0 if it is the first
stage, and ``high = end + 1``, or ``L + 2`` if it is the last.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import sympy

from lightning_mist.cost.inputs.arrays import ArrayRecord, prefix_sums
from lightning_mist.cost.inputs.candidates import StageCandidates
from lightning_mist.cost.inputs.expressions import BoolArray, FloatArray, IntArray, compile_expressions
from lightning_mist.errors import PlanError
from lightning_mist.model.spec import (
    MICROBATCH,
    SEQUENCE,
    CollectiveSpec,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OperatorKind,
    TensorSpec,
)
from lightning_mist.plan.mesh import itemsize

KEY_VALUE_STATES = 2
"""Hidden states that keys and values of a layer are taken for whose fused attention is not known."""


def part_of_sequence(spec: ModelSpec, degree: int) -> int | None:
    """Tokens that each of ``degree`` devices sees of every row; ``None`` for a network without sequences and degree 1.

    Raises:
        PlanError: If the sequence cannot be shared out.
    """
    if degree == 1:
        return spec.sequence_length
    if spec.sequence_length is None:
        raise PlanError(
            f"context_parallel_degree = {degree}: {spec.name} was traced without a sequence dimension, which is what "
            "it shares out; use context_parallel_degree = 1"
        )
    if spec.sequence_length % degree:
        raise PlanError(
            f"context_parallel_degree = {degree}: it must divide the sequence length {spec.sequence_length}; use "
            f"{max(d for d in range(1, degree) if spec.sequence_length % d == 0)}"
        )
    return spec.sequence_length // degree


def key_value_bytes(spec: ModelSpec, whole: "RegionCosts") -> FloatArray:
    """Bytes of keys and values of every layer: what its fused attention moves besides queries and results.

    The FLOPs of attention say how large queries are. Masks are not counted: keys are no larger than queries.
    """
    work = whole.forward_work
    is_attention_K = np.array([kind in ("attention", "causal_attention") for kind in work.kinds], dtype=bool)
    itemsize = {"16": 2, "bf16": 2, "transformer": 2, "64": 8}.get(spec.precision.split("-")[0], 4)
    queries_K = work.flops_K / (4.0 * (spec.sequence_length or 1)) * itemsize
    keys_K = np.clip(work.moved_K - 2 * queries_K, 0.0, 2 * queries_K)
    keys_R = work.sums(np.where(is_attention_K, keys_K, 0.0))
    has_attention_R = work.sums(is_attention_K.astype(np.float64)) > 0
    # What a layer hands on: one hidden state, and the few small tensors that cross cuts beside it.
    handed = max(whole.boundary_by_cut.max(initial=0.0), whole.checkpointed_saved_R[1:-1].max(initial=0.0))
    keys_R = np.where(has_attention_R, keys_R, KEY_VALUE_STATES * handed)
    keys_R[[0, -1]] = 0.0
    return keys_R


def on_part(
    part: "RegionCosts", whole: "RegionCosts", keys_R: FloatArray, degree: int, *, whole_tail: bool
) -> "RegionCosts":
    """Costs of one of the devices that share rows, from those of its tokens and of all of them."""
    kept_R = keys_R * (1 - 1 / degree)
    more = {
        "saved_R": kept_R,
        "checkpointed_saved_R": np.zeros_like(kept_R),
        "forward_peak_R": kept_R + keys_R / 2,
        "recompute_forward_peak_R": kept_R + keys_R / 2,
        "backward_peak_R": 1.5 * keys_R,
        "first_backward_peak_R": 1.5 * keys_R,
        "recompute_backward_peak_R": kept_R + 1.5 * keys_R,
        "first_recompute_backward_peak_R": kept_R + 1.5 * keys_R,
    }
    changed = {}
    for name, more_R in more.items():
        found_R = changed[name] = getattr(part, name) + more_R
        ends = [0, -1] if whole_tail else [0]
        found_R[ends] = getattr(whole, name)[ends]
    return replace(part, **changed, batch_bytes=whole.batch_bytes)


_LAYER_ARRAYS = {
    "saved_R": "saved_bytes",
    "checkpointed_saved_R": "checkpointed_saved_bytes",
    "forward_peak_R": "forward_peak_bytes",
    "backward_peak_R": "backward_peak_bytes",
    "first_backward_peak_R": "first_backward_peak_bytes",
    "recompute_backward_peak_R": "recompute_backward_peak_bytes",
    "first_recompute_backward_peak_R": "first_recompute_backward_peak_bytes",
    "forward_flops_R": "forward_flops",
    "backward_flops_R": "backward_flops",
    "weight_flops_R": "weight_flops",
    "weight_R": "weight_bytes",
}
"""Arrays of :class:`RegionCosts`, and the expressions of a layer that they are made of."""

_HELD = (
    "recompute_forward_peak_R",
    "handed_R",
    "checkpointed_handed_R",
    *(name for name, of in _LAYER_ARRAYS.items() if of.endswith(("saved_bytes", "peak_bytes"))),
)
"""Arrays of :class:`RegionCosts` that say bytes that are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionWork:
    """The work of one direction of every region, by kind of operator; see :class:`OperatorCost`.

    Attributes:
        of_K: Which kind of region each entry belongs to.
        flops_K, moved_K, calls_K: What its operators do together, and how many they are.
    """

    kinds: tuple[OperatorKind, ...]
    of_K: IntArray
    flops_K: FloatArray
    moved_K: FloatArray
    calls_K: FloatArray
    of_R: IntArray

    def sums(self, values_K: FloatArray) -> FloatArray:
        """Sums over the entries of every region."""
        sums = np.bincount(self.of_K, values_K, minlength=int(self.of_R.max()) + 1).astype(float)
        return sums[self.of_R]


Collectives = tuple[tuple[str, FloatArray, FloatArray], ...]
"""By operation: its name, the bytes of whole tensors and the number of calls of every region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCosts:
    """Every expression of a network at one number of rows. Bytes, FLOPs; see :class:`LayerSpec` for the meanings.

    ``recompute_forward_peak_R`` are forward peaks of layers that will be recomputed, for which the plain ones are an
    upper bound. ``handed_R`` and ``checkpointed_handed_R`` are the bytes of what a region saves for the next one alone:
    a stage that ends behind it has them only until they have been sent.

    Attributes:
        below: Where layers have moved a share of what they keep: what the region in front of each has, with what that
            is given, if it is not recomputed, and if it is.
    """

    saved_R: FloatArray
    checkpointed_saved_R: FloatArray
    forward_peak_R: FloatArray
    recompute_forward_peak_R: FloatArray
    backward_peak_R: FloatArray
    first_backward_peak_R: FloatArray
    recompute_backward_peak_R: FloatArray
    first_recompute_backward_peak_R: FloatArray
    forward_flops_R: FloatArray
    backward_flops_R: FloatArray
    forward_work: RegionWork
    backward_work: RegionWork
    recompute_work: RegionWork
    weight_flops_R: FloatArray
    weight_R: FloatArray
    handed_R: FloatArray
    checkpointed_handed_R: FloatArray
    boundary_by_cut: FloatArray
    gradient_boundary_by_cut: FloatArray
    forward_collectives: Collectives
    backward_collectives: Collectives
    batch_bytes: float
    shared_saved_bytes: float
    below: tuple[FloatArray, FloatArray] | None = None

    @property
    def is_causal_R(self) -> FloatArray:
        """1 where fused attention skips what lies behind a causal mask, 0 elsewhere."""
        is_causal_K = np.array([kind == "causal_attention" for kind in self.forward_work.kinds], dtype=float)
        return np.minimum(self.forward_work.sums(is_causal_K), 1.0)


def regions_of(spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """The specification of every region, in execution order."""
    return (spec.head, *(spec.layers[kind] for kind in spec.kinds), spec.tail)


def compile_regions(spec: ModelSpec) -> Callable[..., RegionCosts]:
    """A function from microbatch rows, and devices that share each row, to what every region costs on one of them."""
    kinds = (spec.head, *spec.layers, spec.tail)
    kind_R = np.array([0, *(1 + kind for kind in spec.kinds), len(kinds) - 1], dtype=np.int64)
    layer_expressions = [getattr(kind, name) for name in _LAYER_ARRAYS.values() for kind in kinds]
    layer_expressions += [
        kind.forward_peak_bytes if kind.forward_peak_if_recomputed is None else kind.forward_peak_if_recomputed
        for kind in kinds
    ]
    layer_expressions += [_handed(kind, recomputed=recomputed) for recomputed in (False, True) for kind in kinds]
    cuts: list[Sequence[TensorSpec]] = [(), *spec.boundaries, ()] if spec.num_layers else [()]
    crossing = [_bytes(tensors) for tensors in cuts]
    crossing += [_bytes([tensor for tensor in tensors if tensor.requires_grad]) for tensors in cuts]
    collectives = [_collectives(kinds, direction) for direction in ("forward", "backward")]
    is_partial = any(kind.recompute_work is not None for kind in kinds)
    passes = _PASSES if is_partial else _PASSES[:2]
    works = [[item for kind in kinds for item in _work(kind, name)] for name in passes]
    operators = [size for work in works for item in work for size in (item.flops, item.moved_bytes)]
    exchanged = [bytes_ for found in collectives for _, sizes, _ in found for bytes_ in sizes]
    every = (*operators, *layer_expressions, *crossing, *exchanged, spec.batch_bytes, spec.shared_saved_bytes)
    evaluate = compile_expressions([sympy.sympify(e) for e in every], [MICROBATCH, SEQUENCE])

    known: dict[int, Callable[..., RegionCosts]] = {}

    def at(rows: float, context: int = 1) -> RegionCosts:
        # Without a sequence dimension no expression contains its symbol, so any number does.
        numbers = evaluate(rows, float(part_of_sequence(spec, context) or 1))
        worked, values = numbers[: len(operators)].reshape(-1, 2).T, numbers[len(operators) :]
        layers, rest = np.split(values, [len(layer_expressions)])
        bytes_of = iter(rest[2 * len(cuts) : -2].reshape(-1, len(kinds)))
        exchanges = [
            tuple((name, next(bytes_of)[kind_R], calls[kind_R]) for name, _, calls in found) for found in collectives
        ]
        arrays = dict(
            zip(
                (*_LAYER_ARRAYS, "recompute_forward_peak_R", "handed_R", "checkpointed_handed_R"),
                layers.reshape(-1, len(kinds))[:, kind_R],
                strict=True,
            )
        )
        ends = accumulate(map(len, works), initial=0)
        parts = dict(zip(passes, (worked[:, begin:end] for begin, end in pairwise(ends)), strict=True))
        done = {name: _region_work(kinds, kind_R, name, part) for name, part in parts.items()}
        found = RegionCosts(
            **arrays,
            forward_work=done["forward"],
            backward_work=done["backward"],
            recompute_work=done["recompute" if is_partial else "forward"],
            boundary_by_cut=rest[: len(cuts)],
            gradient_boundary_by_cut=rest[len(cuts) : 2 * len(cuts)],
            forward_collectives=exchanges[0],
            backward_collectives=exchanges[1],
            batch_bytes=float(rest[-2]),
            shared_saved_bytes=float(rest[-1]),
        )
        if context == 1:
            return found
        whole = at(rows)
        if (part := spec.on_row_part(context)) is not None:
            if context not in known:
                known[context] = compile_regions(part)
            held = known[context](rows)
            return replace(found, **{name: getattr(held, name) for name in _HELD}, batch_bytes=whole.batch_bytes)
        gathers = any(split.degree == context and split.notes for split in spec.module_map.contexts)
        return on_part(found, whole, key_value_bytes(spec, whole), context, whole_tail=gathers)

    return at


_PASSES = ("forward", "backward", "recompute")


def _work(kind: LayerSpec, direction: str) -> tuple[OperatorCost, ...]:
    if direction == "recompute":
        return kind.forward_work if kind.recompute_work is None else kind.recompute_work
    return kind.forward_work if direction == "forward" else kind.backward_work


def _region_work(kinds: Sequence[LayerSpec], kind_R: IntArray, direction: str, sizes: FloatArray) -> RegionWork:
    """The work of one direction, given FLOPs and bytes of its entries."""
    items = [(index, item) for index, kind in enumerate(kinds) for item in _work(kind, direction)]
    return RegionWork(
        kinds=tuple(item.kind for _, item in items),
        of_K=np.array([index for index, _ in items], dtype=np.int64),
        flops_K=sizes[0],
        moved_K=sizes[1],
        calls_K=np.array([item.calls for _, item in items], dtype=np.float64),
        of_R=kind_R,
    )


def _handed(kind: LayerSpec, *, recomputed: bool) -> sympy.Expr:
    """Bytes that are saved for the next part's backward only; none where allocations are not known one by one."""
    if kind.events is None:
        return sympy.S.Zero
    return sympy.Add(
        *(
            item.size.expression
            for item in kind.events.way(recomputed=recomputed, first=True).forward
            if item.slot is not None and item.dies is not None and item.dies.direction == "backward"
        )
    )


def _collectives(kinds: Sequence[LayerSpec], direction: str) -> tuple[tuple[str, list[sympy.Expr], FloatArray], ...]:
    """Operations of one direction with their bytes and calls by kind of region."""
    found = [getattr(kind, f"{direction}_collectives") for kind in kinds]
    names = dict.fromkeys(item.operation for items in found for item in items)

    def total(items: Sequence[CollectiveSpec], name: str) -> sympy.Expr:
        return sympy.Add(*(item.bytes for item in items if item.operation == name))

    return tuple(
        (
            name,
            [total(items, name) for items in found],
            np.array([sum(item.calls for item in items if item.operation == name) for items in found], dtype=float),
        )
        for name in names
    )


def _bytes(tensors: Sequence[TensorSpec]) -> sympy.Expr:
    return sympy.Add(*(tensor.bytes for tensor in tensors))


def covered(spec: ModelSpec, start_K: IntArray, end_K: IntArray) -> tuple[IntArray, IntArray]:
    """The half-open range of regions that stages of layers ``[start, end)`` cover."""
    low_K: IntArray = start_K + (start_K > 0)
    high_K: IntArray = end_K + 1 + (end_K == spec.num_layers)
    return low_K, high_K


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRegions(ArrayRecord):
    """Regions of stages: ``[low, high)`` are covered, and of these ``[first, middle)`` are recomputed layers."""

    low_K: IntArray
    high_K: IntArray
    first_K: IntArray
    middle_K: IntArray

    @classmethod
    def of(cls, spec: ModelSpec, candidates: StageCandidates) -> "StageRegions":
        """The regions of each candidate."""
        low_K, high_K = covered(spec, candidates.start_K, candidates.end_K)
        first_K = candidates.start_K + 1
        return cls(low_K=low_K, high_K=high_K, first_K=first_K, middle_K=first_K + candidates.checkpointed_K)

    @property
    def last_K(self) -> IntArray:
        """The last region of each stage."""
        return self.high_K - 1

    def is_recomputed(self, region_K: IntArray) -> BoolArray:
        """Whether a region of each stage is recomputed."""
        is_inside_K: BoolArray = (region_K >= self.first_K) & (region_K < self.middle_K)
        return is_inside_K

    def sums(self, values_R: FloatArray) -> FloatArray:
        """Sums over the regions of each stage; of several rows, those of each."""
        before_R = prefix_sums(values_R)
        return before_R[..., self.high_K] - before_R[..., self.low_K]

    def recomputed_sums(self, values_R: FloatArray) -> FloatArray:
        """Sums over the recomputed layers of each stage."""
        before_R = prefix_sums(values_R)
        return before_R[self.middle_K] - before_R[self.first_K]


def runs_between(
    low_J: IntArray, high_J: IntArray, near: Sequence[IntArray], changes: Iterable[int]
) -> tuple[IntArray, IntArray]:
    """Regions of stages cut into runs.

    Args:
        low_J: The first region of each stage; and so on of regions past the last.
        near: Where each stage is cut, as far as that lies inside it.
        changes: Where every stage is cut.

    Returns:
        The first region of each run, in order, and how many it has, 0 where a stage has no more; axes for runs and for
        stages.
    """
    mark_RJ = np.stack([low_J, *near, *(np.full(len(low_J), change) for change in changes), high_J])
    mark_RJ = np.sort(np.clip(mark_RJ, low_J, high_J), axis=0)
    count_RJ = np.diff(mark_RJ, axis=0)
    order_RJ = np.argsort(count_RJ == 0, axis=0, kind="stable")[: int((count_RJ > 0).sum(axis=0).max(initial=0))]
    return np.minimum(np.take_along_axis(mark_RJ, order_RJ, 0), high_J - 1), np.take_along_axis(count_RJ, order_RJ, 0)


def parameter_regions(spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """For each parameter of ``spec.parameters``, the sorted regions that use it.

    The module map knows parts between layers and the tail only as belonging to the layer before them, so a parameter
    used in the map's last region is the tail's unless its slot lies inside the last block. What nothing uses goes with
    the block that it lies in, if any, or else with the last stage, so it counts as the tail's.
    """
    uses = {use.name: use for use in spec.module_map.parameters}
    blocks, tail = spec.module_map.blocks, spec.num_layers + 1
    result = []
    for parameter in spec.parameters:
        found: set[int] = set()
        use = uses.get(parameter.name)
        for module_name, _, regions in use.slots if use else ():
            for region in regions:
                beyond = region >= 0 and not f"{module_name}.".startswith(f"{blocks[region]}.")
                found.add(tail if beyond and region == len(blocks) - 1 else region + 1)
        if not found and use is not None:
            home = spec.module_map.home(use)
            inside = any(f"{name}.".startswith(f"{blocks[home]}.") for name, *_ in use.slots) if blocks else False
            found.add(home + 1 if inside else tail)
        result.append(tuple(sorted(found)) or (tail,))
    return tuple(result)


# Which regions of a network use which parameters, and what a stage reduces of their gradients.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """Bytes of parameters, and for each how many of the regions before each region use it.

    Attributes:
        trainable_P: Bytes of each trained parameter, 0 for frozen ones.
        dealt_P: Bytes by which owners are assigned: of the whole parameter, also where tensor parallelism splits it.
        is_first_P: Whether it is dealt out first, as what is trained is; owners stay where gradients are offloaded.
        together_P: Whether the gradient of a parameter is made with those of inputs where weights' are made apart: it
            is no matrix, or an embedding.
        uses_PR: Number of regions below ``r`` that use the parameter, ``r`` in ``0 .. L + 2``.
        single_R: Trained bytes of the parameters that exactly one region uses, by region.
        reduced_JR: Bytes of those gradients that are complete, in backward, with the one of region ``r``: of trained
            parameters that no region before uses in a stage that begins with region ``f``. Stages whose first regions
            make no difference share a row.
        reduced_row_R: Row of these two for a stage that begins with each region.
    """

    bytes_P: FloatArray
    trainable_P: FloatArray
    dealt_P: FloatArray
    is_first_P: BoolArray
    together_P: BoolArray
    uses_PR: IntArray
    single_R: FloatArray
    used_R: FloatArray
    trained_R: FloatArray
    reduced_JR: FloatArray
    reductions_JR: FloatArray
    reduced_row_R: IntArray
    count_R: FloatArray

    @classmethod
    def of(cls, spec: ModelSpec) -> "ParameterTable":
        """The table of a network."""
        regions = parameter_regions(spec)
        count = spec.num_layers + 2
        used_PR = np.zeros((len(regions), count), dtype=np.int64)
        for index, used in enumerate(regions):
            used_PR[index, list(used)] = 1
        trainable_P = np.array([p.bytes if p.trainable else 0 for p in spec.parameters], dtype=np.float64)
        bytes_P = np.array([p.bytes for p in spec.parameters], dtype=np.float64)
        known = {use.name: use for use in spec.module_map.parameters}
        dealt = [
            prod(known[p.name].shape) * itemsize(known[p.name].dtype) if p.name in known else p.bytes
            for p in spec.parameters
        ]
        is_matrix = [
            p.name in known and len(known[p.name].shape) == 2 and 0 not in r
            for p, r in zip(spec.parameters, regions, strict=True)
        ]
        uses_PR = np.concatenate([np.zeros((len(regions), 1), dtype=np.int64), used_PR.cumsum(axis=1)], axis=1)
        return cls(
            bytes_P=bytes_P,
            dealt_P=np.array(dealt, dtype=np.float64),
            is_first_P=trainable_P > 0,
            together_P=~np.array(is_matrix, dtype=bool),
            uses_PR=uses_PR,
            used_R=bytes_P @ used_PR.astype(np.float64),
            count_R=used_PR.sum(axis=0).astype(np.float64),
            **_trained(trainable_P, uses_PR),
        )

    def training(self, chosen_P: BoolArray) -> "ParameterTable":
        """The same where of the trained parameters only some are trained."""
        return replace(self, **_trained(self.trainable_P * chosen_P, self.uses_PR))


def _trained(trainable_P: FloatArray, uses_PR: IntArray) -> dict[str, Any]:
    """What of a table depends on which parameters are trained."""
    used_PR = np.diff(uses_PR, axis=1)
    alone_P = uses_PR[:, -1] == 1
    rows, row_R = _first_uses(used_PR, uses_PR)
    return {
        "trainable_P": trainable_P,
        "single_R": (trainable_P * alone_P) @ used_PR.astype(np.float64),
        "trained_R": trainable_P @ used_PR.astype(np.float64),
        "reduced_JR": np.stack([trainable_P @ first_PR for first_PR in rows]),
        "reductions_JR": np.stack([(trainable_P > 0) @ first_PR.astype(np.float64) for first_PR in rows]),
        "reduced_row_R": row_R,
    }


def _first_uses(used_PR: IntArray, uses_PR: IntArray) -> tuple[list[BoolArray], IntArray]:
    """Which regions are the first of a stage that use a parameter, by where the stage begins, and the row of each."""
    rows: list[BoolArray] = []
    row_R = np.zeros(used_PR.shape[1], dtype=np.int64)
    several_P = used_PR.sum(axis=1) > 1
    for low in range(used_PR.shape[1]):
        # Only a stage that begins behind a use of a parameter with several differs from one that begins before it.
        if low == 0 or (used_PR[:, low - 1] * several_P).any():
            rows.append((used_PR > 0) & (uses_PR[:, :-1] <= uses_PR[:, low : low + 1]))
        row_R[low] = len(rows) - 1
    return rows, row_R
