"""One Lightning batch through a plan, and what user code sees of it."""

from lightning_mist.strategy.training.batch_exchange import check_same_samples, digest_of, take_apart
from lightning_mist.strategy.training.engine import NOT_AVERAGED, Engine, ManualEngine, connected, module_state
from lightning_mist.strategy.training.evaluation import FINISHED, Evaluator, without_values
from lightning_mist.strategy.training.failure_handling import EndsTogether, Preemption
from lightning_mist.strategy.training.log_records import (
    LogRecorder,
    MetricCall,
    MetricRecorder,
    as_place,
    named_metrics,
    recorded_logs,
    replay,
    standing_in,
)
from lightning_mist.strategy.training.microbatch_step import Piece, results_of
from lightning_mist.strategy.training.step_guard import StepCall, StepGuard
from lightning_mist.strategy.training.whole_model import attach_engine, gradients_are_about_to_go
