"""Fitted numbers of a machine, what runs have corrected of them, and their files."""

from lightning_mist.hardware.profile.correction_store import (
    CorrectionStore,
    correction_store,
    load_corrections,
    save_corrections,
)
from lightning_mist.hardware.profile.corrections import Observation, Term, corrected, factor_of, learn
from lightning_mist.hardware.profile.hardware_profile import (
    OPERATIONS,
    CollectiveCost,
    ComputeRate,
    Correction,
    HardwareProfile,
    KernelRate,
    MemoryRate,
    StepOverheads,
)
from lightning_mist.hardware.profile.interference_model import (
    CHANNELS,
    COEFFICIENTS,
    Channel,
    Interference,
    seconds_together,
    speed_table,
)
from lightning_mist.hardware.profile.machine_file import read_machine
from lightning_mist.hardware.profile.profile_files import (
    load_profile,
    profile_path,
    read_profile,
    save_profile,
    write_profile,
)

__all__ = [
    "CHANNELS",
    "COEFFICIENTS",
    "OPERATIONS",
    "Channel",
    "CollectiveCost",
    "ComputeRate",
    "Correction",
    "CorrectionStore",
    "HardwareProfile",
    "Interference",
    "KernelRate",
    "MemoryRate",
    "Observation",
    "StepOverheads",
    "Term",
    "corrected",
    "correction_store",
    "factor_of",
    "learn",
    "load_corrections",
    "load_profile",
    "profile_path",
    "read_machine",
    "read_profile",
    "save_corrections",
    "save_profile",
    "seconds_together",
    "speed_table",
    "write_profile",
]
