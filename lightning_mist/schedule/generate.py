"""The order of forwards and backwards of every stage, for each pipeline schedule.

``"gpipe"`` (Huang et al., 2019) runs all forwards, then all backwards; every microbatch is in flight at once.

``"1f1b"`` (Narayanan et al., 2019, PipeDream-flush) lets stage ``i`` of ``S`` run ``min(S - i - 1, G)`` warm-up
forwards, then one forward and one backward in turn, then the backwards that remain. Without transfers both take equally
long; 1F1B holds at most ``min(S - i, G)`` microbatches.
"""

from lightning_mist.plan import ScheduleName
from lightning_mist.plan.plan import SCHEDULES
from lightning_mist.schedule.action import Action, ActionKind, Schedule


def generate(num_stages: int, num_microbatches: int, name: ScheduleName = "1f1b") -> Schedule:
    """The forwards and backwards of every stage in order, nothing else.

    Args:
        num_stages: Number of pipeline stages, at least 1.
        num_microbatches: Number of microbatches per batch, at least 1.
        name: Which schedule.

    Returns:
        One tuple of actions per stage, each with every ``F`` and every ``B`` once.

    Raises:
        ValueError: If a count is below 1 or the name is not known.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages = {num_stages}, num_microbatches = {num_microbatches}: both must be at least 1 to make a "
            "schedule"
        )
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: known schedules are {', '.join(SCHEDULES)}")
    return tuple(
        _stage(stage, num_microbatches if name == "gpipe" else num_stages - stage - 1, num_microbatches)
        for stage in range(num_stages)
    )


def _stage(stage: int, warm_up: int, num_microbatches: int) -> tuple[Action, ...]:
    warm_up = min(warm_up, num_microbatches)
    order: list[tuple[ActionKind, int]] = [(ActionKind.FORWARD, index) for index in range(warm_up)]
    for index in range(num_microbatches - warm_up):
        order += [(ActionKind.FORWARD, warm_up + index), (ActionKind.BACKWARD, index)]
    order += [(ActionKind.BACKWARD, index) for index in range(num_microbatches - warm_up, num_microbatches)]
    return tuple(Action(stage, kind, microbatch) for kind, microbatch in order)
