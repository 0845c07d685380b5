"""The work of a part of a step, by kind of operator, as expressions.

Matrix products and convolutions are told apart by their sizes: those that do as much as one another at every size of
the batch are one entry. All other operators of a kind are one entry.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_mist.model.spec import Basis, MisfitError, OperatorCost, OperatorKind
from lightning_mist.model.trace.ledger import PhaseCount

_BY_SIZE: frozenset[OperatorKind] = frozenset({"matmul", "convolution"})
"""Kinds whose speed depends on the size of each call."""

_Column = tuple[tuple[int, int], ...]
"""FLOPs and bytes at every size."""


def fit_work(
    basis: Basis, phases: Sequence[PhaseCount], what: str, *, later: Sequence[PhaseCount] = ()
) -> tuple[OperatorCost, ...]:
    """The work of one direction of a part.

    Args:
        basis: The sizes at which it was counted.
        phases: What was counted at each.
        what: What it is, for errors.
        later: The same at some sizes, the first one first, in a step that finds gradients and adds to them: what it
            moves beyond the others depends on the parameters alone. The result is about it, if it is given.

    Raises:
        MisfitError: If the number of operators depends on the size, or what they do is no polynomial of it.
    """
    calls = _calls(phases, what)
    after = _calls(later, what) if later else calls
    added = _added(phases[0], later[0]) if later else Counter()
    entries: list[OperatorCost] = []
    columns = _columns(phases)
    for kind in sorted({*calls, *after}):
        found = columns.get(kind, [])
        if kind in _BY_SIZE:
            if after[kind] != calls[kind] or added[kind]:
                raise MisfitError(f"adding to gradients changes the {kind} operators of the {what}")
            sizes = Counter(found)
        else:
            totals = tuple(
                (sum(column[i][0] for column in found), sum(column[i][1] for column in found) + added[kind])
                for i in range(len(phases))
            )
            sizes = Counter({totals: after[kind]})
        entries += [_entry(basis, kind, column, count, what) for column, count in sizes.items() if count]
    return tuple(entries)


def _entry(basis: Basis, kind: OperatorKind, column: _Column, calls: int, what: str) -> OperatorCost:
    """Of a kind that is told apart by size a column is one call, of others it is all of them."""
    times = calls if kind in _BY_SIZE else 1
    return OperatorCost(
        kind=kind,
        flops=basis.fit([times * flops for flops, _ in column], f"FLOPs of the {what}"),
        moved_bytes=basis.fit([times * moved for _, moved in column], f"moved bytes of the {what}"),
        calls=calls,
    )


def _calls(phases: Sequence[PhaseCount], what: str) -> Counter[OperatorKind]:
    counts = [Counter(kind for kind, _, _ in phase.work) for phase in phases]
    if any(count != counts[0] for count in counts):
        numbers = sorted({sum(count.values()) for count in counts})
        raise MisfitError(f"the number of operators of the {what} depends on the size: {numbers}")
    return counts[0]


def _columns(phases: Sequence[PhaseCount]) -> dict[OperatorKind, list[_Column]]:
    """By kind, what each of its operators did at every size, matched by their order."""
    lists: list[dict[OperatorKind, list[tuple[int, int]]]] = []
    for phase in phases:
        by_kind: dict[OperatorKind, list[tuple[int, int]]] = defaultdict(list)
        for kind, flops, moved in phase.work:
            by_kind[kind].append((flops, moved))
        lists.append(by_kind)
    return {kind: list(zip(*(item[kind] for item in lists), strict=True)) for kind in lists[0]}


def _added(first: PhaseCount, later: PhaseCount) -> Counter[OperatorKind]:
    """Bytes that are moved beyond those of the first microbatch, which may also be fewer."""
    moved: Counter[OperatorKind] = Counter()
    for sign, phase in ((1, later), (-1, first)):
        for kind, _, size in phase.work:
            moved[kind] += sign * size
    return moved
