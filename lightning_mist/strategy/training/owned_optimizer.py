"""The user's optimizer while a plan runs: over what this rank owns, its state where the plan wants it."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import PlanError
from lightning_mist.model import counting_reason
from lightning_mist.plan import ModuleMap
from lightning_mist.runtime.communication import DistributedTransport, complete
from lightning_mist.runtime.executor import Executor
from lightning_mist.runtime.offload import offload_optimizer_state
from lightning_mist.runtime.parameters import (
    Part,
    gather_optimizer_state,
    load_full_optimizer_state,
    local_optimizer_state,
    restrict_optimizer,
)


class OwnedOptimizer:
    """One rank's part of the user's optimizer: cut to what the rank owns, parts of parameters by canonical name.

    Raises:
        PlanError: If its state is to be offloaded and it cannot be stepped on one unit after the other.
    """

    def __init__(
        self,
        optimizer: Any,
        executor: Executor,
        parts: Mapping[str, Part],
        module_map: ModuleMap,
        *,
        device: torch.device,
    ) -> None:
        parameters, mesh = executor.stages.parameters, executor.mesh
        ratios = mesh.plan.stages[mesh.stage].offload
        for name in ("optimizer", "parameters", "gradients"):
            if (ratio := getattr(ratios, name)) > 0.0 and (why := counting_reason(optimizer)) is not None:
                raise PlanError(f"stages[{mesh.stage}].offload.{name} = {ratio}: {why}; use offload.{name} = 0")
        owned = [parameters[item.name] for item in mesh.owned]
        self.cut = restrict_optimizer(optimizer, owned, {parameters[name]: part for name, part in parts.items()})
        self._transport, self._device = executor.transport, device
        self._offloaded = offload_optimizer_state(
            *(optimizer, mesh, module_map, parameters, executor.streams, executor.state_pool, executor.shards),
            *(executor.gradients, executor.transport),
        )
        if self._offloaded is not None:
            executor.take_update(self._offloaded)

    def release(self, timeout: timedelta | None) -> Callable[[], dict[str, Any]]:
        """Give the optimizer all its parameters back.

        Returns:
            What :meth:`state` would have given, on rank 0, whenever all ranks call it, also when the engine's groups of
            processes are gone. Until then each keeps in host memory the state of what it updated.
        """
        if self._offloaded is not None:
            self._offloaded.end()
        cut, device = self.cut, self._device
        kept = {
            number: {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in entry.items()}
            for number, entry in local_optimizer_state(cut).items()
        }
        cut.restore()

        def ask() -> dict[str, Any]:
            transport = DistributedTransport((), device, timeout=timeout)
            try:
                return complete(gather_optimizer_state(cut, transport, mine=kept, device=device)) or {}
            finally:
                transport.close()

        return ask

    def state(self) -> dict[str, Any]:
        """The state in the layout of the whole model on rank 0; empty on the others."""
        if self._offloaded is not None:
            self._offloaded.settle()
        return complete(gather_optimizer_state(self.cut, self._transport)) or {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of state in the layout of the whole model."""
        if self._offloaded is None:
            load_full_optimizer_state(self.cut, state)
        else:
            self._offloaded.settle()
            home = self._offloaded.send_home
            load_full_optimizer_state(
                self.cut, state, apart=self._offloaded.offloaded, loaded=lambda parameter: home([parameter])
            )
