"""What the parts of a step cost, as expressions through counts at several sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

from lightning_mist.model.batches import batch_tensors
from lightning_mist.model.fit import Basis, MisfitError
from lightning_mist.model.saved import PhaseCount
from lightning_mist.model.spec import CollectiveSpec, LayerSpec
from lightning_mist.model.step import StepCount, Subject, count_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """The four ways to run a step at one size: layers kept or recomputed, gradients to be made or there already."""

    first: StepCount
    later: StepCount
    recompute_first: StepCount
    recompute_later: StepCount
    batch_bytes: int


def run_variants(subject: Subject, batch: Any, twins: Sequence[int | None], *, recomputes: bool) -> Variants:
    """Run a step in all ways.

    Args:
        subject: The step.
        batch: On what.
        twins: Which blocks answer for others; see :func:`count_step`.
        recomputes: Whether blocks can be recomputed; if not, the costs of recomputation are those without.
    """

    def run(recompute: bool, gradients_exist: bool) -> StepCount:
        return count_step(subject, batch, twins=twins, recompute=recompute, gradients_exist=gradients_exist)

    first, later = run(False, False), run(False, True)
    if [p.operators for p in first.forward] != [p.operators for p in later.forward]:
        # The first run at a size filled a cache of the user's module; later steps of training find it there.
        first = run(False, False)
    size = sum(t.numel() * t.element_size() for t in batch_tensors(batch))
    if not subject.blocks or not recomputes:
        return Variants(first=first, later=later, recompute_first=first, recompute_later=later, batch_bytes=size)
    return Variants(
        first=first,
        later=later,
        recompute_first=run(True, False),
        recompute_later=run(True, True),
        batch_bytes=size,
    )


def layer_spec(basis: Basis, runs: Sequence[Variants], part: int, kind: str, example: str) -> LayerSpec:
    """Fit every count of one part.

    Args:
        basis: The sizes.
        runs: What was counted at each.
        part: Index of the part: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail.
        kind: Label of the part.
        example: Qualified name of the block, if it is one.

    Raises:
        MisfitError: If a count is no polynomial of the sizes.
    """

    def fit(count: Callable[[Variants], int], what: str) -> sympy.Expr:
        return basis.fit([count(run) for run in runs], f"{what} of the {kind}")

    def peak(timeline: Callable[[Variants], list[int]], what: str) -> sympy.Expr:
        return basis.fit_peak([timeline(run) or [0] for run in runs], f"{what} of the {kind}")

    def operators(count: Callable[[Variants], int], what: str) -> int:
        counts = {count(run) for run in runs}
        if len(counts) > 1:
            raise MisfitError(f"the number of {what} operators of the {kind} depends on the size: {sorted(counts)}")
        return counts.pop()

    return LayerSpec(
        kind=kind,
        example=example,
        forward_flops=fit(lambda run: run.first.forward[part].flops, "forward FLOPs"),
        backward_flops=fit(lambda run: run.first.backward[part].flops, "backward FLOPs"),
        forward_moved_bytes=fit(lambda run: run.first.forward[part].moved_bytes, "forward moved bytes"),
        backward_moved_bytes=fit(lambda run: run.later.backward[part].moved_bytes, "backward moved bytes"),
        forward_operators=operators(lambda run: run.first.forward[part].operators, "forward"),
        backward_operators=operators(lambda run: run.later.backward[part].operators, "backward"),
        saved_bytes=fit(lambda run: run.first.saved[part], "saved bytes"),
        checkpointed_saved_bytes=fit(lambda run: run.recompute_first.saved[part], "checkpointed saved bytes"),
        forward_peak_bytes=peak(lambda run: run.first.forward_peaks(part), "forward peak"),
        backward_peak_bytes=peak(lambda run: run.later.backward_peaks(part), "backward peak"),
        first_backward_peak_bytes=peak(lambda run: run.first.backward_peaks(part), "first backward peak"),
        recompute_backward_peak_bytes=peak(lambda run: run.recompute_later.backward_peaks(part), "recompute peak"),
        first_recompute_backward_peak_bytes=peak(
            lambda run: run.recompute_first.backward_peaks(part), "first recompute peak"
        ),
        weight_flops=fit(lambda run: run.first.forward[part].weight_flops, "FLOPs of weight gradients"),
        weight_bytes=fit(lambda run: run.first.forward[part].weight_bytes, "bytes for weight gradients"),
        forward_collectives=_collectives(basis, [run.first.forward[part] for run in runs], kind),
        backward_collectives=_collectives(basis, [run.later.backward[part] for run in runs], kind),
    )


def not_recomputed(part: LayerSpec) -> LayerSpec:
    """The head or the tail. What the head keeps may still depend on whether layers recompute."""
    return replace(
        part,
        recompute_backward_peak_bytes=part.backward_peak_bytes,
        first_recompute_backward_peak_bytes=part.first_backward_peak_bytes,
    )


def _collectives(basis: Basis, phases: Sequence[PhaseCount], kind: str) -> tuple[CollectiveSpec, ...]:
    """What tensor-parallel ranks exchange in one direction of a part."""
    calls = [{name: count for name, (count, _) in phase.collectives.items()} for phase in phases]
    if any(found != calls[0] for found in calls):
        raise MisfitError(f"the number of collectives of the {kind} depends on the size: {calls}")
    return tuple(
        CollectiveSpec(
            operation=name,
            calls=count,
            bytes=basis.fit([phase.collectives[name][1] for phase in phases], f"bytes of {name} of the {kind}"),
        )
        for name, count in sorted(calls[0].items())
    )
