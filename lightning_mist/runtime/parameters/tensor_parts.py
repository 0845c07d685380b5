"""Parameters that tensor parallelism has shared out: which part a rank has, and who has the others."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightning_mist.plan import ModuleMap, ParameterSplit, Plan
from lightning_mist.plan.mesh import HeldParameter
from lightning_mist.schedule.flats import stage_flats
from lightning_mist.tensor_parallel import shard, unshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of a parameter."""

    split: ParameterSplit
    degree: int
    index: int
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The parameter's canonical name."""
        return self.split.name

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.split.local_shape(self.shape, self.degree)

    def shape_at(self, index: int) -> tuple[int, ...]:
        """Shape of one of the parts: the same for all."""
        return self.local_shape

    def take(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor of the parameter's shape; contiguous, with memory of its own."""
        return shard(whole, self.split, self.index, self.degree)

    def runs(self) -> list[tuple[int, int, int]]:
        """What lies together along the shared dimension: where in the whole, where in the part, and how much."""
        dim, rank = self.split.dim % len(self.shape), len(self.shape)
        numbers = torch.arange(self.shape[dim]).view([-1 if index == dim else 1 for index in range(rank)])
        index = self.take(numbers).flatten()
        starts = [0, *(index.diff().sub(1).nonzero().flatten() + 1).tolist(), len(index)]
        return [(int(index[start]), start, end - start) for start, end in pairwise(starts)]

    def placed(self, local: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Views of this part, each with where it begins in the whole tensor."""
        dim = self.split.dim % len(self.shape)
        zeros = [0] * len(self.shape)
        for whole, start, length in self.runs():
            yield (*zeros[:dim], whole, *zeros[dim + 1 :]), local.narrow(dim, start, length)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in their order."""
        return unshard(parts, self.split)


def parts_of(plan: Plan, rank: int, module_map: ModuleMap) -> dict[str, Part]:
    """The parameters of which a rank has a part, by canonical name."""
    group = plan.group_of(plan.stage_of(rank))
    mesh = plan.stages[group].mesh
    shapes = {use.name: use.shape for use in module_map.parameters}
    owners = module_map.owners(plan.bounds)
    return {
        split.name: Part(
            split=split,
            degree=mesh.tensor_parallel_degree,
            index=mesh.devices.index(rank) % mesh.tensor_parallel_degree,
            shape=shapes[split.name],
        )
        for split in module_map.split(mesh.tensor_parallel_degree).parameters
        if group in map(plan.group_of, owners[split.name])
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Speakers:
    """Who answers for one parameter.

    Attributes:
        ranks: Global ranks. What they have, in this order, makes the whole; one rank where it is not shared out.
        part: The first rank's part; None if tensor parallelism does not share it out. Of what is shared out evenly too
            several ranks have some.
    """

    ranks: tuple[int, ...]
    part: Part | None


def speakers_of(plan: Plan, parameters: Sequence[HeldParameter], module_map: ModuleMap) -> dict[str, Speakers]:
    """For each parameter the ranks that answer for it: who updates something of it, once."""
    parts: dict[int, dict[str, Part]] = {}
    found, evenly = {}, dict[str, tuple[int, ...]]()
    for item in parameters:
        group, owner = item.stages[0], item.owners[0]
        mesh = plan.stages[group].mesh
        if group not in parts:
            parts[group] = parts_of(plan, mesh.devices[0], module_map)
            evenly |= _having(plan, module_map, group, parts[group])
        part = parts[group].get(item.name)
        first = owner * mesh.tensor_parallel_degree
        count = 1 if part is None else mesh.tensor_parallel_degree
        ranks = evenly[item.name] if item.is_even else mesh.devices[first : first + count]
        found[item.name] = Speakers(ranks=ranks, part=part)
    return found


def _having(plan: Plan, module_map: ModuleMap, group: int, parts: Mapping[str, Part]) -> dict[str, tuple[int, ...]]:
    """Ranks of the first shard group that have something of what is shared out evenly, by name, one for each part."""
    mesh = plan.stages[group].mesh
    width = mesh.tensor_parallel_degree
    found = {}
    for flat in stage_flats(plan, module_map, group):
        for index, name in enumerate(flat.names):
            spans = [flat.span(index, place) for place in range(flat.degree)]
            places = [place for place, (low, high) in enumerate(spans) if low < high]
            count = width if name in parts else 1
            found[name] = tuple(rank for place in places for rank in mesh.devices[place * width :][:count])
    return found
