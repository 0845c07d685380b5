"""Measuring the machine at hand."""

from lightning_mist.hardware.measure.measure import measure_profile

__all__ = ["measure_profile"]
