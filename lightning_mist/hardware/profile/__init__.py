"""Fitted numbers of a machine, what runs have corrected of them, and their files."""

from lightning_mist.hardware.profile.corrections import (
    CorrectionStore,
    Observation,
    Term,
    corrected,
    correction_store,
    factor_of,
    learn,
    load_corrections,
    save_corrections,
)
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
    ends_together,
    seconds_together,
    speed_table,
)
from lightning_mist.hardware.profile.profile_files import (
    load_profile,
    profile_path,
    read_machine,
    read_profile,
    save_profile,
    write_profile,
)
