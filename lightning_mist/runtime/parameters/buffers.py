"""Buffers kept alike over ranks, as torch's ``DistributedDataParallel`` does: those of rank 0 count.

They are broadcast before a forward, whatever the step does to them, if the forward before it was one whose gradients
were to be averaged. That a buffer is a constant cannot be told from outside (writing to its ``.data`` leaves no trace),
so all are sent, as under data parallelism, in one message for each device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_mist.attributes import replaced
from lightning_mist.runtime.communication import Transport, Work

unversioned = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Inside, writing into these tensors counts for nobody: what autograd saved of a buffer stays valid, as under DDP."""


class BufferSync:
    """The buffers of one rank's module."""

    def __init__(self, module: nn.Module, transport: Transport, *, is_enabled: bool = True) -> None:
        self._module, self._transport, self.is_enabled = module, transport, is_enabled
        self._world = tuple(range(transport.world_size))
        # What DDP calls `require_forward_param_sync` and `require_backward_grad_sync`.
        self._is_due, self._averages = True, True

    @property
    def is_due(self) -> bool:
        """Whether the next forward gives every rank the buffers of rank 0."""
        return self.is_enabled and self._is_due

    @property
    def averages(self) -> bool:
        """Whether gradients of a backward that comes now are to be averaged over ranks."""
        return self._averages

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, gradients are only added up, as inside DDP's ``no_sync``."""
        return replaced(self, _averages=False)

    def before_forward(self) -> Iterator[Work]:
        """Give every rank the buffers of rank 0, if they are due; every rank calls it before the same forward."""
        if not self.is_due or len(self._world) == 1:
            return
        together: dict[torch.device, list[Tensor]] = {}
        for buffer in self._buffers():
            together.setdefault(buffer.device, []).append(buffer)
        for device, buffers in together.items():
            yield from self._broadcast(buffers, device)

    def after_forward(self) -> None:
        """Note whether the buffers are to be alike again before the next forward."""
        self._is_due = self._averages and torch.is_grad_enabled()

    def _buffers(self) -> list[Tensor]:
        # Asked anew each time: modules may put other tensors in their place.
        ignored = set(getattr(self._module, "_ddp_params_and_buffers_to_ignore", ()))
        named = self._module.named_buffers()
        return [memory_of(buffer.detach()) for name, buffer in named if name not in ignored and not buffer.is_meta]

    def _broadcast(self, buffers: list[Tensor], device: torch.device) -> Iterator[Work]:
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        if self._transport.rank == 0:
            flat = torch.cat([buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        yield self._transport.broadcast(flat, 0, self._world)
        if self._transport.rank == 0:
            return
        with torch.no_grad(), unversioned(tuple(buffers)):
            for buffer, part in zip(buffers, torch.split(flat, sizes), strict=True):
                # A part may begin where its type may not: its copy begins anywhere.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def memory_of(tensor: Tensor) -> Tensor:
    """A view in which no place of memory comes twice, though in ``tensor`` (one that was expanded) some do."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.select(dim, 0).unsqueeze(dim)
    return tensor
