"""What a device does beside computing: streams, events, memory. The one place that knows of kinds of devices."""

from lightning_mist.devices.ops import DeviceOps, HostOps, MemoryUse, ops_of, used_generators
from lightning_mist.devices.transfer import Homeward, packed, read, to_device, unpacked
