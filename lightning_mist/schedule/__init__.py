"""When things happen: lists of actions. No torch, no Lightning."""

from lightning_mist.schedule.action import Action, ActionKind, Schedule
from lightning_mist.schedule.chrome_trace import Level, Span, to_chrome_trace
from lightning_mist.schedule.lowering import arrived_sends, complete_gradients, lower, lower_forwards
from lightning_mist.schedule.orders import generate
from lightning_mist.schedule.program_clock import StepRules
from lightning_mist.schedule.schedule_simulation import Simulation, simulate, simulate_plan
from lightning_mist.schedule.seconds import ActionSeconds
from lightning_mist.schedule.validation import check
