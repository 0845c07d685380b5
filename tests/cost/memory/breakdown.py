"""Peaks of candidates of a slot by term."""

from lightning_mist.cost.memory import device_memory, moments_of


def breakdown(model, slot, candidates):
    """The peak of each candidate, as of a stage of a plan."""
    needs, moments = model.needs(slot, candidates), moments_of(slot)
    return device_memory([needs], needs.always, needs.update, moments, needs.host_bytes(moments))
