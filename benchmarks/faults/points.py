"""Where a fit can come to harm, and what harm there is.

None of the places are hooks of the user's, of which the planner would have to think that they look at parameters.
"""

import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.faults.worlds import HARM

TEXT = "the harm that was done"
"""Said by every exception that is raised on purpose."""


def _raise(error: BaseException) -> None:
    raise error


KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "error": lambda: _raise(RuntimeError(TEXT)),
    "memory": lambda: _raise(MemoryError(TEXT)),
    "leave": lambda: os._exit(0),
    "exit": lambda: _raise(SystemExit(TEXT)),
}

Plans = Literal["any", "engine", "auto", "stages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A function that is harmed when it is called.

    Attributes:
        where: Module and name.
        rank: The rank that comes to harm.
        after: Whether it does so when the function has run, and not before.
        call: At which call.
        plans: Under which plans the function runs.
    """

    where: str
    rank: int = 1
    after: bool = False
    call: int = 1
    plans: Plans = "any"


_PROJECT = "benchmarks.faults.project:Fragile"
_STRATEGY, _ENGINE = "lightning_mist.strategy", "lightning_mist.strategy.training.engine:Engine"

_LOOPS, _CONNECTORS = "lightning.pytorch.loops", "lightning.pytorch.trainer.connectors"

POINTS = {
    "setup": Point(where=f"{_PROJECT}.setup"),
    "first batch": Point(where="benchmarks.faults.project:Rows.__getitem__"),
    "map": Point(where=f"{_PROJECT}.seen_while_planning"),
    "machine": Point(where=f"{_STRATEGY}.planning.local_machine:machine_profile", plans="auto"),
    "layers": Point(where=f"{_STRATEGY}.planning.planning_state:time_layers", plans="auto"),
    "search": Point(where=f"{_STRATEGY}.monitoring.profile_corrections:Basis.tune", rank=0, plans="auto"),
    "checks": Point(where=f"{_STRATEGY}.planning.workflow:_check"),
    "groups": Point(
        where="lightning_mist.runtime.communication.transport:DistributedTransport.__init__", after=True, plans="engine"
    ),
    "engine": Point(where=f"{_ENGINE}.begin", plans="engine"),
    "restore": Point(where=f"{_CONNECTORS}.checkpoint_connector:_CheckpointConnector.restore_training_state"),
    "first forward": Point(where=f"{_PROJECT}.seen_while_training"),
    "forward": Point(where=f"{_PROJECT}.seen_while_training", call=9),
    "backward": Point(where=f"{_PROJECT}.seen_in_backward", call=5),
    "after backward": Point(where="lightning.pytorch.strategies.ddp:DDPStrategy.post_backward", call=4),
    "optimizer": Point(where=f"{_STRATEGY}.strategy:MistBase.optimizer_step", call=4),
    "batch end": Point(where=f"{_LOOPS}.training_epoch_loop:_TrainingEpochLoop.update_lr_schedulers", call=5),
    "loader": Point(where="benchmarks.faults.project:Rows.__getitem__", call=30),
    "validation": Point(where=f"{_PROJECT}.validation_step", call=2),
    "fill": Point(where=f"{_ENGINE}.fill", plans="engine"),
    "gather": Point(where=f"{_ENGINE}.module_values", plans="stages"),
    "gather optimizer": Point(where=f"{_ENGINE}.optimizer_state", plans="engine"),
    "save": Point(where=f"{_STRATEGY}.checkpoints.checkpoint_hooks:save_file", rank=0),
    "epoch end": Point(where=f"{_LOOPS}.fit_loop:_FitLoop.on_advance_end"),
    "teardown": Point(where=f"{_STRATEGY}.strategy:MistBase.teardown"),
    "release": Point(where=f"{_ENGINE}.release_optimizers", plans="engine"),
}


def arm(point: Point, kind: str, folder: Path, *, everybody: bool = False) -> None:
    """Let this process come to harm at a point.

    Args:
        point: Where.
        kind: Of which kind.
        folder: Where the moment is noted.
        everybody: Whether all ranks do, not only the point's.
    """
    if not everybody and os.environ["LOCAL_RANK"] != str(point.rank):
        return
    module, _, path = point.where.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), iter(range(1, 1 << 30))

    def harm() -> None:
        (folder / HARM).touch(exist_ok=True)
        KINDS[kind]()

    def harmed(*args: Any, **kwargs: Any) -> Any:
        is_time = next(calls) == point.call
        if is_time and not point.after:
            harm()
        result = original(*args, **kwargs)
        if is_time and point.after:
            harm()
        return result

    setattr(owner, name, harmed)
