"""Peaks of candidates of a slot by term."""

from lightning_mist.cost.memory import device_memory, host_bytes, moments_of


def breakdown(model, slot, candidates):
    """The peak of each candidate, as of a stage of a plan."""
    needs, moments = model.needs(slot, candidates), moments_of(slot)
    host_K = host_bytes(model, slot, candidates, needs, moments)
    return device_memory([needs], needs.always, needs.update, moments, host_K)
