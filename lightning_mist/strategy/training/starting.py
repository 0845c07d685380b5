"""This rank's engine for a plan."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_mist.plan import ModuleMap, Plan
from lightning_mist.plan.mesh import message_pairs, process_groups, talking_groups
from lightning_mist.runtime.communication import DistributedTransport, Transport
from lightning_mist.runtime.cutting import CutRules
from lightning_mist.runtime.host_memory import HostPlace
from lightning_mist.schedule import check, lower
from lightning_mist.strategy.training.engine import Engine


def start_engine(
    module: nn.Module,
    plan: Plan,
    module_map: ModuleMap,
    *,
    device: torch.device,
    timeout: timedelta | None,
    rules: CutRules | None = None,
    host: HostPlace | None = None,
) -> Engine:
    """This rank's engine for a plan over torch.distributed; every rank calls it at the same time."""
    transport = DistributedTransport(
        process_groups(plan, module_map),
        device,
        pairs=message_pairs(plan),
        talking=talking_groups(plan),
        timeout=timeout,
    )
    return make_engine(module, plan, module_map, transport, device=device, rules=rules, host=host)


def later(
    state: Callable[[Transport], dict[str, Any]] | None, device: torch.device, timeout: timedelta | None
) -> Callable[[], dict[str, Any]] | None:
    """What an engine's optimizer has released, to be asked for when the engine's groups of processes are gone.

    Args:
        state: What :meth:`Engine.release_optimizer` gave.
        device: Where tensors travel.
        timeout: How long gloo waits for a peer.
    """
    if state is None:
        return None

    def ask() -> dict[str, Any]:
        transport = DistributedTransport((), device, timeout=timeout)
        try:
            return state(transport)
        finally:
            transport.close()

    return ask


def make_engine(
    module: nn.Module,
    plan: Plan,
    module_map: ModuleMap,
    transport: Transport,
    *,
    device: torch.device,
    rules: CutRules | None = None,
    host: HostPlace | None = None,
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
        host=host,
    )
