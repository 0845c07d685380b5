"""The profile of the machine at hand: from the cache, or measured by all ranks together."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mist.hardware import HardwareProfile, load_profile, measure_profile, save_profile
from lightning_mist.strategy.progress import Progress


def default_directory() -> Path:
    """Where profiles are kept unless the user says otherwise."""
    return Path.home() / ".cache" / "lightning-mist"
