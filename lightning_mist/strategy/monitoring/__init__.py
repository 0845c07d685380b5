"""Predicted against measured, and what a run teaches of its machine."""

from lightning_mist.strategy.monitoring.profile_corrections import Basis, Learner, with_corrections
from lightning_mist.strategy.monitoring.run_report import RunReport, StageReport
from lightning_mist.strategy.monitoring.stage_times import (
    CLOSURE,
    FORWARD,
    STEP,
    Measured,
    StageTimes,
    over_stages,
    over_steps,
    predicted_times,
    step_times,
)
