"""One Lightning batch through a plan, and what user code sees of it."""

from lightning_mist.strategy.training.accumulation import gradients_are_about_to_go
from lightning_mist.strategy.training.engine import Engine
from lightning_mist.strategy.training.evaluation import (
    WholeEvaluation,
    as_wrapped,
    broadcasts_buffers,
    check_evaluation,
)
from lightning_mist.strategy.training.log_records import LogRecord, LogRecorder, recorded_logs, replay
from lightning_mist.strategy.training.microbatch_step import results_of
from lightning_mist.strategy.training.precision import attach_engine
from lightning_mist.strategy.training.starting import later, start_engine
from lightning_mist.strategy.training.step_guard import StepGuard

__all__ = [
    "Engine",
    "LogRecord",
    "LogRecorder",
    "StepGuard",
    "WholeEvaluation",
    "as_wrapped",
    "attach_engine",
    "broadcasts_buffers",
    "check_evaluation",
    "gradients_are_about_to_go",
    "later",
    "recorded_logs",
    "replay",
    "results_of",
    "start_engine",
]
