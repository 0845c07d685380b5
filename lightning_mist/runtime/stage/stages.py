"""The stages that one rank runs, over one copy of the module: one, or its chunks under an interleaved schedule."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_mist.attributes import set_on_class
from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.calls import without_caches
from lightning_mist.plan.mesh import make_mesh
from lightning_mist.runtime.communication import Transport
from lightning_mist.runtime.stage.fake_parameters import free_parameters
from lightning_mist.runtime.stage.pipeline_stage import PipelineStage
from lightning_mist.runtime.stage.stage_split import StageSplit, TransportGroup


class RankStages:
    """All stages of one rank.

    Several stages of a rank share one module, so only one of them can be attached at a time. A single stage stays
    attached for a whole batch; of several, each is attached for as long as it computes.

    Attributes:
        parameters: Every parameter that any of them computes with, or keeps for others, by canonical name; one that
            several use is one entry.
    """

    parameters: dict[str, nn.Parameter]
    foreign: dict[str, nn.Parameter]

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = {stage.index: stage for stage in stages}
        every = {**stages[0].parameters, **stages[0].foreign}
        held = {name for stage in stages for name in stage.parameters}
        self.parameters = {name: parameter for name, parameter in every.items() if name in held}
        self.foreign = {name: parameter for name, parameter in every.items() if name not in held}

    def __iter__(self) -> Iterator[PipelineStage]:
        """The stages, ascending."""
        return iter(self._stages.values())

    def __getitem__(self, index: int) -> PipelineStage:
        """One stage by its index in the plan."""
        return self._stages[index]

    @property
    def every(self) -> Mapping[str, nn.Parameter]:
        """All parameters of the module by canonical name."""
        return {**self.foreign, **self.parameters}

    def attached(self) -> AbstractContextManager[None]:
        """Inside, a batch runs: a single stage is attached all the while, several only where they compute."""
        return nullcontext() if len(self._stages) > 1 else next(iter(self)).attached()

    @contextmanager
    def at(self, index: int) -> Iterator[PipelineStage]:
        """Around one computation of a stage, inside :meth:`attached`: the module is this stage."""
        stage = self._stages[index]
        with nullcontext() if len(self._stages) == 1 else stage.attached():
            yield stage

    def free_foreign(self) -> None:
        """Free the storage of the parameters that other ranks' stages hold."""
        free_parameters(self.foreign.values())


def make_stages(
    module: nn.Module, module_map: ModuleMap, plan: Plan, rank: int, transport: Transport
) -> tuple[PipelineStage, ...]:
    """The stages that ``rank`` runs under ``plan``, ascending."""
    group = plan.stage_of(rank)
    mesh, split = plan.stages[group].mesh, None
    if mesh.num_row_peers > 1:
        is_context = mesh.context_parallel_degree > 1
        found = (
            module_map.context(mesh.context_parallel_degree)
            if is_context
            else module_map.split(mesh.tensor_parallel_degree)
        )
        peers = make_mesh(plan, rank, module_map).row_peers
        split = StageSplit(
            found, TransportGroup(transport, peers, adds_later=is_context), sequence_parallel=mesh.shares_sequence
        )
    return tuple(
        PipelineStage(
            module,
            module_map,
            plan.bounds,
            index,
            checkpointing=plan.stages[index].checkpointing,
            split=split,
        )
        for index in plan.chunks(group)
    )


@contextmanager
def no_caches(module: nn.Module, module_map: ModuleMap) -> Iterator[None]:
    """Inside, the blocks of a module get no empty key-value caches while gradients are wanted.

    Models of transformers make such caches by default, and each block then keeps a copy of its keys and values until
    the step has ended. Parts of a cut module never get any; this is for one that runs as a whole. It is their classes
    that do so: modules, and what is copied or saved of them, are as the user made them.
    """
    blocks = [module.get_submodule(name) for name in module_map.blocks if "transformers.cache_utils" in sys.modules]
    numbers = {id(block) for block in blocks}

    def dropping(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def drop(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(block) in numbers and torch.is_grad_enabled():
                args, kwargs = without_caches(args, kwargs)
            return call(block, *args, **kwargs)

        return drop

    with ExitStack() as stack:
        for cls in {type(block) for block in blocks}:
            stack.enter_context(set_on_class(cls, "__call__", dropping(cls.__call__)))
        yield
