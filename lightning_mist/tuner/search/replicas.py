"""Pipelines that come in several copies, which need less memory for the batches that their ranks load.

A rank may have the batches of all ranks of its copy of the pipeline at a time. There are as many copies as the greatest
common divisor of the stages' data-parallel degrees, which no stage knows by itself, so that a search prices every stage
with the divisor that all its arrangements have. Of what does not fit so, something may fit with its own: every plan is
one of those whose degrees are all multiples of some number, and searched among these it is priced with that many copies
or more.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from lightning_mist.model.spec import ModelSpec, bytes_at
from lightning_mist.tuner.inter_stage import PRECISION
from lightning_mist.tuner.search.mixed_slots import Stages
from lightning_mist.tuner.search.search_loop import Outcome
from lightning_mist.tuner.space import Space, divisors

MATTERS = 0.01
"""Share of the memory of a device above which the batches of other ranks are worth more searches where something
fits with all of them. Below it a plan may be missed that fits only without them, by this share of memory at most."""

_NOTE = (
    "pipelines in several copies were looked for apart, as each loads the batches of its own ranks only; HiGHS has not "
    "checked them all"
)


def search_copies(
    look: Callable[[Space, float, float], tuple[Stages, Outcome]], spec: ModelSpec, space: Space
) -> tuple[Stages, Outcome]:
    """The best pipeline, of those in several copies too.

    Args:
        look: Searches a space with so many more bytes on each device, for plans below so many seconds.
    """
    stages, outcome = look(space, 0.0, inf)
    copies, saved = degrees_of_copies(space), most_saved(spec, space)
    matters = outcome.winner is None or saved / stages.memory_limit > MATTERS
    if outcome.is_late or not copies or not matters:
        return stages, outcome
    # Whatever fits with the batches of its own copy fits with so many more bytes.
    _, loose = look(space, saved, outcome.least)
    if loose.least >= outcome.least * (1 - PRECISION):
        bound = min(outcome.bound, loose.bound)
        return stages, replace(outcome, bound=bound, is_late=loose.is_late)
    degrees = (replace(space.search, data_parallel_degrees=item) for item in copies)
    every = [(stages, outcome), *(look(replace(space, search=search), 0.0, outcome.least) for search in degrees)]
    is_late = any(item.is_late for _, item in every)
    bound = min(item.bound for _, item in every)
    stages, best = min(every, key=lambda item: item[1].least)
    notes = (*best.notes, _NOTE) if best.winner is not None else best.notes
    return stages, replace(best, bound=bound, certified=False, notes=notes, is_late=is_late)


def degrees_of_copies(space: Space) -> tuple[tuple[int, ...], ...]:
    """Data-parallel degrees that pipelines in several copies may have: those that are multiples of 2, of 3, ..

    Returns:
        Sets of degrees, each other than that of all; none where stages are priced with their own batches anyway.
    """
    degrees = space.data_degrees()
    numbers = sorted({number for degree in degrees for number in divisors(degree)} - {1})
    found = dict.fromkeys(tuple(degree for degree in degrees if degree % number == 0) for number in numbers)
    # One stage is one of all devices, and several have at most half of them on some.
    fit = (item for item in found if 2 * min(item) <= space.world_size and item != degrees)
    return tuple(fit) if max(space.stage_counts, default=1) > 1 else ()


def most_saved(spec: ModelSpec, space: Space) -> float:
    """Bytes by which a stage's own batches may be less than those that it is priced with, at most."""
    loaders, length = space.data_parallel_size, spec.sequence_length or 1
    if loaders is None:  # every copy loads one batch, of all rows at most
        return float(bytes_at(spec.batch_bytes, space.global_batch_size, length))
    return float((loaders - 1) * bytes_at(spec.batch_bytes, space.global_batch_size // loaders, length))
