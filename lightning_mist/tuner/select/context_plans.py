"""The fastest plan of equal stages whose devices share rows, where context parallelism is asked for or rows are long.

The exact search has none of these plans.
There are few where all stages are alike, so that all are tried. What is recomputed goes in quarters of stages, and the
first ZeRO stage that fits is taken, since each more exchanges more.
"""

from collections.abc import Iterator
from math import inf

from lightning_mist.cost import seconds_with
from lightning_mist.plan import Checkpointing, ModuleMap, Plan, StageMesh, StagePlan, ZeroStage
from lightning_mist.plan.rank_order import rank_layout
from lightning_mist.tuner.candidates import IntraStage
from lightning_mist.tuner.select.selection import clocked
from lightning_mist.tuner.select.simplest_plan import fits_within
from lightning_mist.tuner.space import Space, divisors

_RECOMPUTED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of each stage's layers that are tried, unless shares are asked for."""


def known_contexts(space: Space, module_map: ModuleMap) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The degrees asked for that the module allows, by default all of these, and why not others."""
    known = [split.degree for split in module_map.contexts]
    asked = space.search.context_parallel_degrees
    notes = []
    for degree in asked or ():
        if degree not in known:
            why = "; ".join(module_map.excludes("context")) or dict(module_map.uncontexts).get(
                degree, "it was not shown that so many devices that share rows compute the same"
            )
            notes.append(f"without context_parallel_degree {degree}: {why}")
    return tuple(degree for degree in (known if asked is None else asked) if degree in known), tuple(notes)


def fastest_with_context(stages: IntraStage) -> Plan | None:
    """The fastest plan that fits and whose devices share rows, with its prediction; None if there is none."""
    space, model = stages.space, stages.model
    degrees, _ = known_contexts(space, model.spec.module_map)
    fits = fits_within(model, stages.limits, stages.host_limits)
    best, least = None, inf
    for degree in degrees:
        for savings in _families(space, degree):
            plan = next(filter(fits, savings), None)
            if plan is not None and (seconds := seconds_with(model, plan)) < least:
                best, least = plan, seconds
    return None if best is None else clocked(model, best)


def _families(space: Space, degree: int) -> Iterator[Iterator[Plan]]:
    """Plans that share rows among so many devices; of each all ZeRO stages, the least first."""
    for count in space.stage_counts:
        if space.num_layers % count or space.world_size % (count * degree):
            continue
        data, layers = space.world_size // (count * degree), space.num_layers // count
        if data not in (space.search.data_parallel_degrees or (data,)):
            continue
        for num_microbatches in _microbatches(space, data):
            for recomputed in sorted({round(share * layers) for share in _shares(space)}):
                yield _of_every_zero_stage(space, (count, data, degree), num_microbatches, recomputed)


def _shares(space: Space) -> tuple[float, ...]:
    if not space.checkpointing:
        return (0.0,)
    return space.search.checkpointed_shares or _RECOMPUTED


def _microbatches(space: Space, data: int) -> Iterator[int]:
    """Numbers of microbatches that cut every loader's batch into equal parts."""
    search, loaders = space.search, space.data_parallel_size or 1
    for count in divisors(space.global_batch_size // data) if space.global_batch_size % data == 0 else ():
        rows = space.rows(count, data)
        is_asked = count in (search.num_microbatches or (count,)) and rows in (search.microbatch_sizes or (rows,))
        if is_asked and count * data % loaders == 0 and (count * data == loaders or space.cuts_batches):
            yield count


def _of_every_zero_stage(
    space: Space, degrees: tuple[int, int, int], num_microbatches: int, recomputed: int
) -> Iterator[Plan]:
    count, data, context = degrees
    layout = rank_layout([(data, context)] * count, space.devices_per_node)
    layers = space.num_layers // count
    for level in sorted(space.search.zero_stages):
        yield Plan(
            global_batch_size=space.global_batch_size,
            data_parallel_size=space.loaders([data]),
            num_microbatches=num_microbatches,
            schedule=space.schedule,
            stages=tuple(
                StagePlan(
                    layers=(index * layers, (index + 1) * layers),
                    mesh=StageMesh(devices=devices, data_parallel_degree=data, context_parallel_degree=context),
                    microbatch_size=space.rows(num_microbatches, data),
                    zero_stage=ZeroStage(level),
                    checkpointing=Checkpointing(layers=recomputed, kind=space.checkpointing_kinds[0]),
                )
                for index, devices in enumerate(layout)
            ),
        )
