"""How long the actions of a rank take, computing told apart from waiting.

Between actions the recorder only makes marks, events on the stream of computation, which say when the device came
there. What lies between two marks is read when the step is over and the caller has waited for the device, so nothing in
the step waits for a measurement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_mist.devices import ops_of
from lightning_mist.runtime.communication import Work
from lightning_mist.schedule import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """How long something took.

    Attributes:
        action: What it was: an action of the rank's list, or the name of what is not in it.
        waited_seconds: The part of them in which the rank waited for other ranks.
    """

    action: Action | str
    seconds: float
    waited_seconds: float = 0.0


class Recorder:
    """Measures what a rank does, while it is on.

    Attributes:
        is_on: Whether anything is recorded. Off it costs a look at this attribute per action.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._ops = ops_of(device)
        # What happened, where it began, where it ended, and the pairs of marks around each of its waits.
        self._found: list[tuple[Action | str, Any, Any, list[tuple[Any, Any]]]] = []

    def around(self, action: Action | str, run: Iterator[Work]) -> Iterator[Work]:
        """Run an action, and record how long it takes and for how much of that it waits for the works it yields."""
        if not self.is_on:
            yield from run
            return
        waits = []
        began = self._mark()
        for work in run:
            before = self._mark()
            yield work
            # A work may hold the tensor it moved; the next one may be long in coming.
            del work
            waits.append((before, self._mark()))
        self._found.append((action, began, self._mark(), waits))

    @contextmanager
    def phase(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Record what happens inside.

        Args:
            waits: Whether all of it is waiting for other ranks.
        """
        if not self.is_on:
            yield
            return
        began = self._mark()
        yield
        ended = self._mark()
        self._found.append((name, began, ended, [(began, ended)] if waits else []))

    def take(self) -> tuple[Recorded, ...]:
        """What was recorded since the last time, in the order in which it ended.

        On a CUDA device everything recorded must have run by now.
        """
        found, self._found = self._found, []
        return tuple(
            Recorded(
                action=action,
                seconds=self._between(began, ended),
                waited_seconds=sum(self._between(*wait) for wait in waits),
            )
            for action, began, ended, waits in found
        )

    def _mark(self) -> Any:
        return self._ops.record(timed=True)

    def _between(self, began: Any, ended: Any) -> float:
        return self._ops.seconds(began, ended)
