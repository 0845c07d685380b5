"""What users may ask a strategy."""

from typing import TYPE_CHECKING

from lightning_mist.plan import Plan
from lightning_mist.strategy.monitor import Monitor
from lightning_mist.strategy.monitoring import RunReport
from lightning_mist.strategy.planning import Decision

if TYPE_CHECKING:
    from lightning_mist.estimate import MemoryEstimate


class Answers:
    """Properties of the strategy that say what was decided and measured."""

    # What a fit puts in place; None before the first.
    _decision: Decision | None = None
    _monitor: Monitor | None = None
    _is_planning = False

    @property
    def plan(self) -> Plan | None:
        """The plan of the current or last fit."""
        return None if self._decision is None else self._decision.plan

    @property
    def report(self) -> RunReport | None:
        """Predicted against measured of the current or last fit, once enough steps have run."""
        return None if self._monitor is None else self._monitor.report

    @property
    def estimate(self) -> "MemoryEstimate | None":
        """What the plan needs of every device, where that is known."""
        return None if self._decision is None else self._decision.estimate

    @property
    def is_planning(self) -> bool:
        """Whether the step is being tried before training.

        What a step does beside computing (a line in a file, a message) can be left out then:
        ``if not getattr(self.trainer.strategy, "is_planning", False): ...``.
        """
        return self._is_planning
