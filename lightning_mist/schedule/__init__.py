"""When things happen: lists of actions. No torch, no Lightning."""

from lightning_mist.schedule.action import Action, ActionKind, Schedule
from lightning_mist.schedule.check import check, in_flight
from lightning_mist.schedule.generate import generate
from lightning_mist.schedule.lower import lower
from lightning_mist.schedule.simulate import Simulation, StageSeconds, simulate, simulate_plan
from lightning_mist.schedule.trace import Span, to_chrome_trace

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "Simulation",
    "Span",
    "StageSeconds",
    "check",
    "generate",
    "in_flight",
    "lower",
    "simulate",
    "simulate_plan",
    "to_chrome_trace",
]
