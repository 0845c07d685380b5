"""This rank's engine for a plan."""

from datetime import timedelta

import torch
from torch import nn

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import process_groups
from lightning_mist.runtime.cutting.rules import CutRules
from lightning_mist.runtime.transport import DistributedTransport, Transport
from lightning_mist.schedule import check, lower
from lightning_mist.strategy.engine import Engine


def start_engine(
    module: nn.Module,
    plan: Plan,
    module_map: ModuleMap,
    *,
    device: torch.device,
    timeout: timedelta | None,
    rules: CutRules | None = None,
) -> Engine:
    """This rank's engine for a plan over torch.distributed; every rank calls it at the same time."""
    transport = DistributedTransport(process_groups(plan, module_map), device, timeout=timeout)
    return make_engine(module, plan, module_map, transport, device=device, rules=rules)


def make_engine(
    module: nn.Module,
    plan: Plan,
    module_map: ModuleMap,
    transport: Transport,
    *,
    device: torch.device,
    rules: CutRules | None = None,
) -> Engine:
    """The engine of a transport's rank, with the plan's schedule."""
    tied = any(len(stages) > 1 for stages in module_map.owners(plan.bounds).values())
    schedule = lower(plan, tied=tied)
    check(schedule, plan.num_microbatches)
    return Engine(
        module,
        plan,
        module_map,
        rank=transport.rank,
        transport=transport,
        schedule=schedule,
        device=device,
        rules=rules,
    )
