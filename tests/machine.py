"""Machines whose rates are made up, for tests to which they do not matter: measuring takes a quarter of a minute."""

from dataclasses import replace
from pathlib import Path

from lightning_mist.hardware import catalog_profile, detect, save_profile


def assume_profile(folder: Path, processes: int) -> Path:
    """A folder in which the profile of this machine is found, as if it had been measured.

    Args:
        folder: Where to keep it.
        processes: How many there will be on this machine.
    """
    machine = detect(processes, 1, "cpu")
    save_profile(replace(catalog_profile(machine), source="made up"), folder, machine)
    return folder
