"""Measuring the machine at hand."""

from lightning_mist.hardware.measure.machine_bench import measure_profile
