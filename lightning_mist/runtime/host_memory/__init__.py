"""Pinned host memory, the streams that copy to and from it, and where copies land on the device."""

from lightning_mist.runtime.host_memory.copy_streams import Lanes, Rooms
from lightning_mist.runtime.host_memory.host_pool import HostPlace, HostPool, is_host, let_go, room_for, views_into

__all__ = ["HostPlace", "HostPool", "Lanes", "Rooms", "is_host", "let_go", "room_for", "views_into"]
