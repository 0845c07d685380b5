"""Rooms on the device for what comes from host memory: two, from the first use to the end."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mist.runtime.host_memory.host_pool import room_for, views_into
from lightning_mist.schedule.offload_actions import ROOMS


class Rooms:
    """The rooms of one kind of state.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._size = device, 0
        self._buffers: list[Tensor] = []

    def ensure(self, units: Sequence[Sequence[Tensor]]) -> bool:
        """Make rooms in which any of the units has its place, if they are not as large; nothing may be in them.

        Returns:
            Whether they are new.
        """
        size = max(map(room_for, units), default=0)
        if size <= self._size:
            return False
        self._buffers.clear()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(ROOMS)]
        self._size = size
        return True

    def views(self, index: int, like: Sequence[Tensor]) -> list[Tensor]:
        """Views into a room, like the tensors that are to come there."""
        return views_into(self._buffers[index % ROOMS], like)
