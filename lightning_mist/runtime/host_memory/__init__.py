"""Pinned host memory, the streams that copy to and from it, and where copies land on the device."""

from lightning_mist.runtime.host_memory.copy_streams import CopyStreams, DeviceBuffers
from lightning_mist.runtime.host_memory.host_pool import HostPlace, HostPool, is_host, let_go, padded_bytes, views_into
