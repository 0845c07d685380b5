"""Parameters as FSDP, DeepSpeed and Megatron share them out: every unit evenly, in one collective.

The project's runtime deals out whole parameters, whose owners send and are sent one message each. What others run has
one flat parameter for every unit, of which every rank holds an equal part, so that a unit is given out by one
all-gather and its gradients are reduced by one reduce-scatter. Their runs are priced in this way too.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_mist.hardware import HardwareProfile
from lightning_mist.model.spec import ModelSpec, ParameterSpec
from lightning_mist.plan import ParameterUse

MOST_PARTS = 64
"""Parts of a flat parameter at most: with more ranks than that some have one part more than others, of a thousand."""

_EVENLY = {"broadcast": "all_gather", "reduce": "reduce_scatter"}


def evenly_shared(spec: ModelSpec, degree: int) -> ModelSpec:
    """A network whose parameters are, for every set of regions that use them, one flat parameter in equal parts.

    Args:
        degree: Data-parallel ranks, which is how many parts there are, up to :data:`MOST_PARTS`.
    """
    degree = min(degree, MOST_PARTS)
    uses = {use.name: use for use in spec.module_map.parameters}
    groups: dict[tuple[tuple[int, ...], str, bool], list[int]] = {}
    for index, item in enumerate(spec.parameters):
        use = uses[item.name]
        groups.setdefault((use.regions, use.dtype, item.trainable), []).append(index)
    members = list(groups.values())
    parts = [_parts([spec.parameters[index] for index in group], uses, degree) for group in members]

    def regrouped(sizes: Sequence[int]) -> tuple[int, ...]:
        sums = (-(-sum(sizes[index] for index in group) // degree) for group in members)
        return tuple(size for size in sums for _ in range(degree))

    return replace(
        spec,
        parameters=tuple(item for made in parts for item, _ in made),
        module_map=replace(spec.module_map, parameters=tuple(use for made in parts for _, use in made)),
        splits=tuple(replace(split, parameter_bytes=regrouped(split.parameter_bytes)) for split in spec.splits),
    )


def _parts(
    items: Sequence[ParameterSpec], uses: dict[str, ParameterUse], degree: int
) -> list[tuple[ParameterSpec, ParameterUse]]:
    first = items[0]
    slots = uses[first.name].slots[:1]
    owner, attribute, _ = slots[0]
    use = replace(uses[first.name], slots=((owner, attribute, uses[first.name].regions),))
    numel, size = (-(-sum(getattr(item, name) for item in items) // degree) for name in ("numel", "bytes"))
    return [
        (
            replace(first, name=f"{first.name}.{number}", numel=numel, bytes=size),
            replace(use, name=f"{first.name}.{number}", shape=(numel,)),
        )
        for number in range(degree)
    ]


def in_collectives(profile: HardwareProfile) -> HardwareProfile:
    """A machine on which a unit's messages, one of every rank, take together what one collective takes."""
    kept = [cost for cost in profile.collectives if cost.operation not in _EVENLY]
    shared = [
        replace(cost, operation=name, latency_seconds=cost.latency_seconds / min(cost.group_size, MOST_PARTS))
        for name, instead in _EVENLY.items()
        for cost in kept
        if cost.operation == instead
    ]
    return replace(profile, collectives=(*kept, *shared))
