"""When things happen: lists of actions. No torch, no Lightning."""

from lightning_mist.schedule.action import Action, ActionKind, Schedule

__all__ = ["Action", "ActionKind", "Schedule"]
