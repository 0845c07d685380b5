"""What a plan follows from, and what a run that measures its terms teaches of its machine.

All of it happens on rank 0, between steps; the other ranks need to know nothing of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mist.hardware import (
    Cluster,
    Correction,
    CorrectionStore,
    HardwareProfile,
    Observation,
    Term,
    corrected,
    correction_store,
    factor_of,
    learn,
    load_corrections,
    save_corrections,
)
from lightning_mist.model import ModelSpec
from lightning_mist.plan import Feature, Plan, Predicted, SearchSpace
from lightning_mist.runtime.support import executed_offload
from lightning_mist.schedule.seconds import batch_seconds, plan_seconds
from lightning_mist.strategy.run_report import Measured

if TYPE_CHECKING:
    from lightning_mist.tuner import TuneResult

LEAST_CHANGE = 0.05
"""Share of the predicted step by which what was learned must change it, so that later runs plan anew: less cannot be
told from what predictions are wrong by."""

LEAST_STEPS = 5
"""A run of fewer recorded steps teaches nothing: the median of so few says little of how far they scatter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBasis:
    """What the plan of a fit follows from, to learn from and to plan again by.

    Attributes:
        spec: The network, with measured seconds of its layers.
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

    def without(self, feature: Feature, reason: str) -> "PlanBasis":
        """This basis with a feature ruled out."""
        return replace(self, spec=replace(self.spec, module_map=self.spec.module_map.excluding(reason, feature)))

    @property
    def subject(self) -> str:
        """What is planned, in words."""
        return f"{self.spec.num_layers} layers on {self.cluster.world_size} devices"

    def tuned(self, say: Callable[[str], None] | None) -> "tuple[PlanBasis, TuneResult]":
        """The best plan whose estimate fits, and the basis with what it may take, for later plans.

        Args:
            say: Says what is done for that; None where nothing binds, so that the search alone decides.
        """
        from lightning_mist.explain import plan_that_fits
        from lightning_mist.tuner import Planner

        asked, notes = self._asked()
        planner, basis = Planner(self.spec, self.cluster, profile=corrected(self.profile, self.corrections)), self
        found = planner.tune(**asked)
        if say is not None:
            fitting = plan_that_fits(planner, found, asked, say)
            for note in fitting.notes:
                say(note)
            basis, found = replace(self, memory_limit=fitting.asked["memory_limit"]), fitting.result
        return basis, replace(found, notes=(*found.notes, *notes))

    def _asked(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a planner is asked, and what of it cannot be executed here."""
        kinds, notes = executed_offload(self.search.offload, self.cluster.kind, has_files=self.has_files)
        limits = {"memory_limit": self.memory_limit, "host_memory_limit": self.host_limit}
        search = replace(self.search, offload=kinds)
        return {"global_batch_size": self.global_batch_size, **limits, "search": search}, notes

    def predict(self, plan: Plan) -> Predicted:
        """What is known of a plan."""
        from lightning_mist.cost import predict

        return predict(self.spec, corrected(self.profile, self.corrections), self.cluster, plan)


def with_corrections(basis: PlanBasis, directory: Path, precision: str, say: Callable[[str], None]) -> PlanBasis:
    """A basis that knows what earlier runs have taught of its machine; what is used, or why not, is said."""
    store = correction_store(directory, basis.cluster, precision, basis.profile)
    corrections, warning = load_corrections(store)
    if warning is not None:
        say(warning)
    if corrections:
        say(f"predictions are corrected by what earlier runs measured: {_factors(corrections)}")
    return replace(basis, store=store, corrections=corrections)


def _factors(corrections: Sequence[Correction]) -> str:
    return ", ".join(f"{item.term} x {item.factor:.2f}" for item in corrections)


@dataclass(slots=True, kw_only=True)
class Learner:
    """Learns from one run how its machine differs from the profile; on rank 0.

    Args:
        cached_at: Where the plan is kept for later runs, which plan anew if what was learned matters to it.
    """

    basis: PlanBasis
    plan: Plan
    say: Callable[[str], None]
    cached_at: Path | None = None
    _has_learned: bool = False

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
            is_plain=self.plan.is_plain,
            knows_layers=bool(basis.spec.seconds),
        )
        if not any(item.main for item in observations):
            return
        self._has_learned = True
        self.basis = replace(basis, corrections=learn(basis.corrections, observations))
        try:
            save_corrections(basis.store, self.basis.corrections)
            later = "later plans for this machine are corrected by it"
            before, after = (item.predict(self.plan).step_seconds for item in (basis, self.basis))
            if self.cached_at is not None and abs(after - before) > LEAST_CHANGE * before:
                self.cached_at.unlink(missing_ok=True)
                later += ", and the next fit plans anew"
        except OSError as error:
            self.say(f"what this run measured is not kept for later ones: {error}")
            return
        self.say(f"{later}: {_factors(self.basis.corrections)}")


_Terms = dict[Term, float]


_PASSES: dict[Term, tuple[str, ...]] = {
    "forward": ("forward", "recompute"),
    "backward": ("backward", "accumulate"),
    "communication": (
        *("forward_unshard", "backward_unshard", "begin", "forward_again", "backward_again"),
        *("scatter", "ring", "forward_ring"),
    ),
    "overhead": ("overhead", "forward_overhead"),
}
"""Terms of passes, by what corrects them."""


def observe(
    plan: Plan,
    measured: Sequence[Measured | None],
    *,
    corrections: Sequence[Correction],
    is_plain: bool,
    knows_layers: bool,
) -> tuple[Observation, ...]:
    """What a run observed, over all its stages: forwards, backwards, reduction of gradients, and updates.

    A single backward and the reduction beside it are not told apart. Waiting is not observed: it follows from the
    others.

    Args:
        corrections: Those that the prediction was made with; its terms are divided by them.
        is_plain: Whether the plan runs without the runtime.
        knows_layers: Whether computation was predicted from measured layers; if not, nothing is learned of it.
    """
    times = [item.times for item in measured if item is not None]
    if plan.predicted is None or len(times) < plan.num_stages:
        return ()
    breakdowns, stages = [dict(stage.breakdown) for stage in plan.predicted.stages], range(plan.num_stages)

    def uncorrected(term: Term, *names: str) -> list[dict[str, float]]:
        """Terms of every stage."""
        factor, keys = factor_of(corrections, term), [f"{name}_seconds" for name in names]
        return [{key: terms.get(key, 0.0) / factor for key in keys} for terms in breakdowns]

    def over_stages(term: Term, *names: str) -> float:
        return sum(sum(terms.values()) for terms in uncorrected(term, *names))

    found: list[tuple[_Terms, float]] = []
    if not is_plain:
        # The least of all: a group may also have waited where nobody saw it.
        least = min(range(plan.num_groups), key=lambda index: times[index].other_seconds)
        once = sum(uncorrected("overhead", "once")[least].values())
        found.append(({"overhead": once}, times[least].other_seconds))
    passes = {
        term: batch_seconds(plan, plan_seconds(plan, uncorrected(term, *names)).stages)
        for term, names in _PASSES.items()
        if not (is_plain and term == "overhead")
    }
    forward, backward = ({term: sum(both[at] for both in of) for term, of in passes.items()} for at in (0, 1))
    reduction = over_stages("communication", "reduce", "tied")
    update: _Terms = {
        "update": over_stages("update", "update"),
        "communication": over_stages("communication", "gather"),
    }
    has_peers = any(stage.mesh.num_peers > 1 for stage in plan.stages)
    # Without peers reducing is scaling, which predictions count as part of the update.
    kinds: list[tuple[_Terms, tuple[str, ...]]]
    kinds = [(update, ("optimizer_seconds",) if has_peers else ("optimizer_seconds", "reduction_seconds"))]
    if knows_layers:
        kinds.insert(0, (forward, ("forward_seconds",)))
        last: tuple[str, ...] = ("backward_seconds",)
        if has_peers and plan.num_microbatches > 1:
            kinds.insert(1, ({"communication": reduction}, ("reduction_seconds",)))
        elif has_peers:
            last = ("backward_seconds", "reduction_seconds")
            backward["communication"] += reduction
        kinds.append((backward, last))
    for expected, names in kinds:
        found.append((expected, sum(getattr(times[index], name) for index in stages for name in names)))
    # All stages are one observation: they are on one machine, so their errors are not independent.
    every = (Observation(expected=tuple(terms.items()), seconds=seconds) for terms, seconds in found)
    return tuple(item for item in every if sum(seconds for _, seconds in item.expected) > 0 and item.seconds > 0)
