"""Predicted against measured, and what a run teaches of its machine."""

from lightning_mist.strategy.monitoring.profile_corrections import Basis, Learner, with_corrections
from lightning_mist.strategy.monitoring.run_report import (
    CLOSURE,
    FORWARD,
    STEP,
    Measured,
    RunReport,
    StageReport,
    StageTimes,
    over_stages,
    over_steps,
    predicted_times,
    step_times,
)
