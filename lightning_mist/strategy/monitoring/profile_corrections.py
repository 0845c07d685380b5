"""What a run teaches of its machine, and whether another plan would be better by what it taught.

All of it happens on rank 0, between steps; the other ranks need to know nothing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_mist.cost import predict
from lightning_mist.errors import MistError
from lightning_mist.explain import plan_that_fits
from lightning_mist.hardware import (
    Cluster,
    Correction,
    CorrectionStore,
    HardwareProfile,
    corrected,
    correction_store,
    learn,
    load_corrections,
    save_corrections,
)
from lightning_mist.model import ModelSpec
from lightning_mist.plan import Feature, Plan, Predicted, SearchSpace, save
from lightning_mist.plan.plan_text import short_name
from lightning_mist.runtime.support import executed_offload
from lightning_mist.strategy.monitoring.observed_terms import observe
from lightning_mist.strategy.monitoring.run_report import Better
from lightning_mist.strategy.monitoring.stage_times import Measured
from lightning_mist.tuner import Planner, TuneResult

LEAST_GAIN = 0.05
"""Share of the step that another plan must save by the corrected model to be spoken of."""

LEAST_STEPS = 5
"""A run of fewer recorded steps teaches nothing: the median of so few says little of how far they scatter."""

QUICK_SECONDS = 2.0
"""A search that took longer is not repeated while training goes on."""

PATIENCE_SECONDS = 10.0
"""The most seconds that a search may take when training has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What the plan of a fit follows from, to learn from and to plan again by.

    Attributes:
        spec: The network, with measured seconds of its layers.
        global_batch_size: Rows that one batch brings over all devices.
        memory_limit: Bytes of each device that may be used, if the user said so.
        host_limit: Bytes of each node that may be taken for what is offloaded, if that is known.
        has_files: Whether that is in files.
        store: Where what is learned of the machine is kept; None to learn nothing.
    """

    spec: ModelSpec
    profile: HardwareProfile
    cluster: Cluster
    global_batch_size: int
    memory_limit: int | None
    search: SearchSpace
    host_limit: int | None = None
    has_files: bool = False
    store: CorrectionStore | None = None
    corrections: tuple[Correction, ...] = ()

    def without(self, feature: Feature, reason: str) -> "Basis":
        """This basis with a feature ruled out."""
        return replace(self, spec=replace(self.spec, module_map=self.spec.module_map.excluding(reason, feature)))

    @property
    def subject(self) -> str:
        """What is planned, in words."""
        return f"{self.spec.num_layers} layers on {self.cluster.world_size} devices"

    def tune(self) -> TuneResult:
        """The best plan by what is known, of those that can be executed here."""
        return self.tuned(None)[1]

    def tuned(self, say: Callable[[str], None] | None) -> tuple["Basis", TuneResult]:
        """The best plan whose estimate fits, and the basis with what it may take, for later plans.

        Args:
            say: Says what is done for that; None where nothing binds, so that the search alone decides.
        """
        asked, notes = self._asked()
        planner, basis = self._planner(), self
        found = planner.tune(**asked)
        if say is not None:
            fitting = plan_that_fits(planner, found, asked, say)
            for note in fitting.notes:
                say(note)
            basis, found = replace(self, memory_limit=fitting.asked["memory_limit"]), fitting.result
        return basis, replace(found, notes=(*found.notes, *notes))

    def _planner(self) -> Planner:
        return Planner(self.spec, self.cluster, profile=corrected(self.profile, self.corrections))

    def _asked(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a planner is asked, and what of it cannot be executed here."""
        kinds, notes = executed_offload(
            self.search.offload, self.cluster.kind, has_files=self.has_files, master_weights=self.spec.master_weights
        )
        limits = {"memory_limit": self.memory_limit, "host_memory_limit": self.host_limit}
        search = replace(self.search, offload=kinds)
        return {"global_batch_size": self.global_batch_size, **limits, "search": search}, notes

    def predict(self, plan: Plan) -> Predicted:
        """What is known of a plan."""
        return predict(self.spec, corrected(self.profile, self.corrections), self.cluster, plan)


def with_corrections(basis: Basis, directory: Path, precision: str, say: Callable[[str], None]) -> Basis:
    """A basis that knows what earlier runs have taught of its machine; what is used, or why not, is said."""
    store = correction_store(directory, basis.cluster, precision, basis.profile)
    corrections, warning = load_corrections(store)
    if warning is not None:
        say(warning)
    if corrections:
        say(f"predictions are corrected by what earlier runs measured: {_factors(corrections)}")
    return replace(basis, store=store, corrections=corrections)


def _factors(corrections: Sequence[Correction]) -> str:
    return ", ".join(f"{item.term} x {item.factor:.2f} ± {item.spread:.2f}" for item in corrections)


@dataclass(slots=True, kw_only=True)
class Learner:
    """Learns from one run how its machine differs from the profile; on rank 0.

    Args:
        is_plain: Whether the plan runs without the runtime.
        path: Where a better plan is written, if anywhere.
        cached_at: Where the plan is kept for later runs; a better one makes them plan anew.
    """

    basis: Basis
    plan: Plan
    is_plain: bool
    search_seconds: float
    path: Path | None
    say: Callable[[str], None]
    cached_at: Path | None = None
    better: Better | None = None
    _has_learned: bool = False
    _has_looked: bool = False

    def learn(self, measured: Sequence[Measured | None]) -> None:
        """Correct predictions by what the stages measured, once per run, and keep that for later runs."""
        basis = self.basis
        fewest = min((item.steps for item in measured if item is not None), default=0)
        if self._has_learned or basis.store is None or fewest < LEAST_STEPS:
            return
        observations = observe(
            self.plan,
            measured,
            corrections=basis.corrections,
            is_plain=self.is_plain,
            knows_layers=bool(basis.spec.seconds),
        )
        if not observations:
            return
        self._has_learned = True
        self.basis = replace(basis, corrections=learn(basis.corrections, observations))
        try:
            save_corrections(basis.store, self.basis.corrections)
        except OSError as error:
            self.say(f"what this run measured is not kept for later ones: {error}")
            return
        self.say(f"later plans for this machine are corrected by it: {_factors(self.basis.corrections)}")

    def look_again(self, *, is_training: bool) -> None:
        """Search for a plan that is better by what was learned, quickly while training goes on, and write it."""
        if not self._has_learned or self._has_looked or (is_training and self.search_seconds > QUICK_SECONDS):
            return
        self._has_looked = True
        patience = QUICK_SECONDS if is_training else PATIENCE_SECONDS
        search = replace(self.basis.search, solver_seconds=min(patience, self.basis.search.solver_seconds))
        try:
            found = replace(self.basis, search=search).tune()
            current = self.basis.predict(self.plan)
            if found.predicted.step_seconds < (1.0 - LEAST_GAIN) * current.step_seconds:
                if self.path is not None:
                    save(replace(found.plan, fingerprint=self.plan.fingerprint), self.path)
                if self.cached_at is not None:
                    self.cached_at.unlink(missing_ok=True)
                self.better = Better(
                    name=short_name(found.plan),
                    path=None if self.path is None else str(self.path),
                    current_seconds=current.step_seconds,
                    step_seconds=found.predicted.step_seconds,
                )
        except (MistError, OSError) as error:
            self.say(f"no other plan was looked for: {error}")
