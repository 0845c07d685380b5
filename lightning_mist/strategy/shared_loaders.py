"""How ranks that load the same samples look to Lightning: together as one rank of plain data parallelism.

With ``data_parallel_size`` there are fewer data loaders than ranks. Loaders, reductions of logged values and gathered
tensors are those of data parallelism over as many ranks as there are loaders; which process this is, and how many there
are, is what it is: one of them prints and saves.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from lightning_mist.attributes import replaced
from lightning_mist.errors import PlanError
from lightning_mist.strategy.planning import PlanRequest

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object


class SharedLoaders(_Base):
    """Mixed into a strategy: equal groups of neighbouring ranks load the same samples, and count once."""

    _request: PlanRequest
    _one_of_each: Any = None  # the process group with this rank's place in every group of ranks
    _counts_all = False
    _metrics: tuple[Any, ...] = ()

    @property
    def num_loaders(self) -> int | None:
        """How many distinct batches are loaded at once; None if every rank loads its own.

        Raises:
            PlanError: If the ranks do not come in as many equal groups.
        """
        loaders, world = self._request.loaders, self.world_size
        if loaders is not None and (loaders < 1 or world % loaders):
            raise PlanError(
                f"data_parallel_size = {loaders} on {world} processes: equal groups of them load the same samples, so "
                f"it must divide {world}; leave it out if each loads its own"
            )
        return None if loaders == world else loaders

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a ``DistributedSampler`` is to be made with: the number of loaders, and which this rank's is."""
        loaders = self.num_loaders
        if loaders is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": loaders, "rank": self.global_rank * loaders // self.world_size}

    def begin_sharing(self, module: nn.Module) -> None:
        """Make the groups that are reduced over, and let metrics of a module use them; on every rank at once."""
        if self.num_loaders is None:
            return
        if self._one_of_each is None:
            size = self.world_size // self.num_loaders
            for place in range(size):
                group = dist.new_group(list(range(place, self.world_size, size)), timeout=self._timeout)
                if self.global_rank % size == place:
                    self._one_of_each = group
        known = getattr(sys.modules.get("torchmetrics"), "Metric", ())
        found = (item for item in module.modules() if isinstance(item, known))
        self._metrics = tuple(item for item in found if item.process_group is None)
        for metric in self._metrics:
            metric.process_group = self._one_of_each

    def end_sharing(self) -> None:
        """Leave metrics as they were."""
        for metric in self._metrics:
            metric.process_group = None
        self._metrics = ()

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean", **more: Any) -> Any:
        """Reduce over one rank of each loader; has the arguments of Lightning's."""
        return super().reduce(tensor, self._among(group), reduce_op, **more)

    def all_gather(self, tensor: Any, group: Any | None = None, sync_grads: bool = False, **more: Any) -> Any:
        """Gather from one rank of each loader; has the arguments of Lightning's."""
        return super().all_gather(tensor, self._among(group), sync_grads, **more)

    def reduce_boolean_decision(self, decision: bool, all: bool = True, **more: Any) -> bool:
        """Whether all ranks, or any, decided so."""
        with replaced(self, _counts_all=True):
            return super().reduce_boolean_decision(decision, all, **more)

    def _among(self, group: Any | None) -> Any | None:
        is_everybody = group is None or group is dist.group.WORLD
        return self._one_of_each if is_everybody and not self._counts_all and self._one_of_each is not None else group
