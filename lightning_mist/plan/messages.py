"""Which ranks of a running plan send each other what crosses between its stages."""

from collections.abc import Iterator
from itertools import product

from lightning_mist.plan.mesh import Side, tensor_ranks
from lightning_mist.plan.plan import Plan


def message_pairs(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Every pair of ranks of which the first sends to the second; sorted, the same whoever asks.

    Activations go to the next stage, gradients back.
    """
    pairs = {pair for stage in range(plan.num_stages - 1) for pair in _crossing(plan, stage, stage + 1)}
    return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))


def _crossing(plan: Plan, stage: int, following: int) -> Iterator[tuple[int, int]]:
    """Who sends to whom between two stages: ranks that compute on the same rows and hold the same part."""
    first, second = plan.stages[stage], plan.stages[following]
    mine, theirs = first.data_parallel_degree, second.data_parallel_degree
    for here, there in product(range(mine), range(theirs)):
        # Data-parallel index j of d has the rows from j / d to (j + 1) / d of every microbatch.
        if here * theirs >= (there + 1) * mine or there * mine >= (here + 1) * theirs:
            continue
        before, after = tensor_ranks(plan, stage, here), tensor_ranks(plan, following, there)
        # Tensors that have no sequence, and states of generators, are held whole also where others are in parts.
        # So are sequences on a side that their length cannot be divided by.
        for are_shared in product({first.mesh.sequence_parallel, False}, {second.mesh.sequence_parallel, False}):
            degrees = len(before), len(after)
            sides = [Side(degree=n, is_shared=shared) for n, shared in zip(degrees, are_shared, strict=True)]
            yield from ((before[source], after[index]) for source, index in _portions(*sides))
            yield from ((after[source], before[index]) for source, index in _portions(*reversed(sides)))


def _portions(mine: Side, theirs: Side) -> Iterator[tuple[int, int]]:
    """Tensor-parallel indices of one side that send to which of the other."""
    length = mine.degree * theirs.degree  # divisible, as sequences that are shared out are
    for index in range(theirs.degree):
        for source, _, _ in theirs.sources(index, mine, length):
            yield source, index
