"""Which operators run on CUDA devices in the place of those of the host that traces."""

from lightning_mist.model.device.operator_table import KINDS, DeviceOperators, device_operators
