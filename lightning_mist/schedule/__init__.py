"""When things happen: lists of actions. No torch, no Lightning."""

from lightning_mist.schedule.action import Action, ActionKind, Schedule
from lightning_mist.schedule.check import check, in_flight
from lightning_mist.schedule.generate import generate
from lightning_mist.schedule.lower import lower

__all__ = ["Action", "ActionKind", "Schedule", "check", "generate", "in_flight", "lower"]
