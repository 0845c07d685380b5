"""The arithmetic of master weights in a single process, for any plan.

Masters are cast to the type that is computed in before every batch, and gradients of a microbatch are made in that type
and added up in the masters'. A stage's data-parallel ranks scale what they have added up, round it to the computing
type and add it up among themselves in that: once per batch below ZeRO-2, from there on for every microbatch, whose sums
are then added up in the masters' type. Under hybrid sharding a group does so for itself, and the groups' sums are then
added up in the type that they have. (Of a weight that several stages share each stage rounds what it adds, and context-
parallel ranks what each adds; here the sum is rounded.)
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mist.plan import ModuleMap, Plan, StagePlan, ZeroStage, loader_of
from lightning_mist.plan.mesh import stage_ranks
from tests.integration.parity import loss_of, microbatches

_Found = list[list[dict[str, Tensor | None]]]
"""Gradients by data-parallel rank of a stage, microbatch and canonical name."""


@dataclass(frozen=True, slots=True, eq=False)
class Masters:
    """A module in two types.

    Attributes:
        module: Its masters, in their type.
        computed: The same in the type that is computed in.
    """

    module: nn.Module
    computed: nn.Module

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> "Masters":
        """Copies of a module in its own type and in the one to compute in."""
        computed = copy.deepcopy(module).to(dtype)
        for mine, master in zip(computed.parameters(), module.parameters(), strict=True):
            if mine.requires_grad:
                mine.grad_dtype = master.dtype  # also of several uses in one step
        return cls(copy.deepcopy(module), computed)

    def train_batch(self, plan: Plan, module_map: ModuleMap, batches: Sequence[Any]) -> list[Tensor]:
        """Add the gradients of every rank's batch to the masters' gradients.

        Returns:
            Every rank's loss.
        """
        with torch.no_grad():
            for mine, master in zip(self.computed.parameters(), self.module.parameters(), strict=True):
                mine.copy_(master)
        found: dict[int, _Found] = {}
        losses: dict[int, list[Tensor]] = {}
        for index, stage in enumerate(plan.stages):
            degree = stage.mesh.data_parallel_degree
            if degree not in found:
                losses.clear()
                # Ranks that share the tokens of the same rows count once.
                ranks = stage_ranks(plan, index)[:: stage.mesh.context_parallel_degree]
                found[degree] = [self._column(plan, rank, batches, losses) for rank in ranks]
        owners = module_map.owners(plan.bounds)
        types = {name: p.dtype for name, p in self.computed.named_parameters()}
        for name, master in self.module.named_parameters():
            if not master.requires_grad:
                continue
            stage = plan.stages[owners[name][0]]
            columns = found[stage.mesh.data_parallel_degree]
            gradient = _total([[of[name] for of in column] for column in columns], plan, stage, types[name])
            if gradient is not None:
                master.grad = gradient if master.grad is None else master.grad + gradient
        by_loader = {loader_of(plan, owner): torch.stack(parts).sum() for owner, parts in losses.items()}
        return [by_loader[loader_of(plan, rank)] for rank in range(plan.world_size)]

    def _column(
        self, plan: Plan, rank: int, batches: Sequence[Any], losses: dict[int, list[Tensor]]
    ) -> list[dict[str, Tensor | None]]:
        """Gradients of every microbatch of a rank; its losses are added to those of the batches they are cut from."""
        gradients = []
        for part in microbatches(plan, rank, batches):
            self.computed.zero_grad()
            loss = loss_of(self.computed.training_step(copy.copy(part.value), 0))  # type: ignore[operator]
            (loss * part.weight).backward()
            losses.setdefault(part.owner, []).append(part.weight * loss.detach())
            gradients.append({name: p.grad for name, p in self.computed.named_parameters()})
        return gradients

    def values(self) -> dict[str, Tensor]:
        """The masters, and of parameters that are not trained what is computed with, by canonical name."""
        pairs = zip(self.module.named_parameters(), self.computed.parameters(), strict=True)
        return {name: (p if p.requires_grad else mine).detach() for (name, p), mine in pairs}


def _total(
    columns: Sequence[Sequence[Tensor | None]], plan: Plan, stage: StagePlan, narrow: torch.dtype
) -> Tensor | None:
    """One parameter's gradient from those by data-parallel rank and microbatch."""
    scale, size = 1 / plan.num_loaders, min(stage.mesh.shard_ranks, len(columns))
    there = [[g for g in column if g is not None] for column in columns]
    if not any(there):
        return None
    (wide,) = {g.dtype for column in there for g in column}
    if len(columns) == 1:
        return _sum(there[0]) * scale
    groups = [range(first, first + size) for first in range(0, len(columns), size)]
    if stage.zero_stage >= ZeroStage.GRADIENTS:
        rows = [[(g * scale).to(narrow) for g in row] for group in groups for row in _rows(columns, group)]
        return _sum([_sum(row).to(wide) for row in rows if row])
    rounded = [[(_sum(there[place]) * scale).to(narrow) for place in group if there[place]] for group in groups]
    return _sum([_sum(row) for row in rounded if row]).to(wide)


def _rows(columns: Sequence[Sequence[Tensor | None]], ranks: range) -> list[list[Tensor]]:
    """What some ranks have of every microbatch."""
    return [[g for g in row if g is not None] for row in zip(*(columns[rank] for rank in ranks), strict=True)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
