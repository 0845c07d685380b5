"""From a user's fit to a plan that every rank has."""

from typing import Any

from lightning_mist.strategy.planning.decision import (
    Decision,
    PlannedStep,
    PlanRequest,
    given_plan,
    remember_limit,
    write_plan,
)
from lightning_mist.strategy.planning.first_batch import step_of_fit
from lightning_mist.strategy.planning.local_machine import default_directory, machine_profile
from lightning_mist.strategy.planning.memory_budget import is_out_of_memory, refuse_whole, refuse_whole_alone
from lightning_mist.strategy.planning.plain_parallelism import MANUAL, OFFERED, optimizer_reason, whole_module_reason
from lightning_mist.strategy.planning.trial_step import (
    EvaluatedStep,
    is_map_of,
    look_at_step,
    roots_of,
    splits_of_evaluated,
    tried,
)


def __getattr__(name: str) -> Any:
    if name != "decide":
        raise AttributeError(name)
    # What searches is imported where something is planned: programs that plan nothing start sooner.
    from lightning_mist.strategy.planning.workflow import decide

    return decide
