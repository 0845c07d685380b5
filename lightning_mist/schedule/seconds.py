"""How long actions take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan
from lightning_mist.schedule.action import ActionKind
from lightning_mist.schedule.lowering import KINDS, PLACES, program_of
from lightning_mist.schedule.program_clock import Epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSeconds:
    """How long the actions of one stage take, in seconds.

    Attributes:
        forward: A forward that follows a backward of its stage.
        backward: A backward that follows a forward of its stage.
        weight: The part of the backward that makes gradients of weights, ``W`` where backward is split; ``I`` is the
            rest.
        first_forward: Forward of the first microbatch, if it takes another time: its stage begins with no unit there,
            and may have an update to take.
        first_backward: Backward of the first microbatch, if it takes another time: gradients are made that later ones
            are added to. Where backwards are split it is ``W`` that is shorter or longer, but takes no less than 0.
        forward_again: How much longer other forwards take that follow no backward of their stage.
        backward_again: How much longer backwards take that follow no forward of their stage.
        reduce_tied: ``REDUCE_TIED``; the longest of all stages counts.
    """

    forward: float
    backward: float
    weight: float = 0.0
    first_forward: float | None = None
    first_backward: float | None = None
    forward_again: float = 0.0
    backward_again: float = 0.0
    reduce: float = 0.0
    reduce_tied: float = 0.0
    step: float = 0.0
    gather: float = 0.0

    @property
    def epilogue(self) -> Epilogue:
        """What happens once per batch."""
        return Epilogue(reduce=self.reduce, tied=self.reduce_tied, step=self.step, gather=self.gather)

    def of(self, kind: ActionKind, *, is_first: bool = False, is_again: bool = False) -> float:
        """Seconds of a computation; see :func:`~lightning_mist.schedule.lowering.slot_of`."""
        if kind is ActionKind.FORWARD:
            if is_first and self.first_forward is not None:
                return self.first_forward
            return self.forward + is_again * self.forward_again
        backward, weight = self.backward, self.weight
        if is_first and self.first_backward is not None:
            backward = self.first_backward
            weight = max(0.0, weight + self.first_backward - self.backward)
        backward += is_again * self.backward_again
        return {
            ActionKind.BACKWARD: backward,
            ActionKind.BACKWARD_INPUT: backward - weight,
            ActionKind.BACKWARD_WEIGHT: weight,
        }[kind]


def slot_seconds(stages: Sequence[ActionSeconds]) -> list[float]:
    """Seconds of the computations of every slot of a program; see :func:`~lightning_mist.schedule.lowering.slot_of`."""
    every = product(stages, KINDS, (False, True), (False, True))
    return [stage.of(kind, is_first=is_first, is_again=is_again) for stage, kind, is_again, is_first in every]


def batch_seconds(plan: Plan, stages: Sequence[ActionSeconds]) -> list[tuple[float, float]]:
    """Seconds of all forwards of a batch and of all backwards, of every stage of a plan."""
    program = program_of(plan.num_stages, plan.num_microbatches, plan.schedule, num_groups=plan.num_groups)
    times = Counter(slot for line in program.lines for slot, *_ in line)
    each = [times[slot] * seconds for slot, seconds in enumerate(slot_seconds(stages))]
    count, forwards = len(KINDS) * PLACES, PLACES * (KINDS.index(ActionKind.FORWARD) + 1)
    begins = range(0, len(each), count)
    return [(sum(each[at : at + forwards]), sum(each[at + forwards : at + count])) for at in begins]


def crossing_seconds(activation_seconds: Sequence[float], gradient_seconds: Sequence[float]) -> list[float]:
    """Seconds of one message of every crossing of a program, from those of each boundary."""
    return [seconds for both in zip(activation_seconds, gradient_seconds, strict=True) for seconds in both]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeconds:
    """How long everything in a plan takes.

    Attributes:
        stages: Each stage's actions; what a group of devices does once per batch, for all its chunks, at each of them.
        activations: For each boundary receiving the activations of one microbatch.
        gradients: The same for gradients on their way back.
        sent_activations: For each boundary what sending the activations takes of the sender's computation, where
            transfers move within it.
    """

    stages: tuple[ActionSeconds, ...]
    activations: tuple[float, ...]
    gradients: tuple[float, ...]
    sent_activations: tuple[float, ...]
    sent_gradients: tuple[float, ...]

    @property
    def crossings(self) -> list[float]:
        """Seconds that receiving one message of every crossing of a program takes."""
        return crossing_seconds(self.activations, self.gradients)

    @property
    def sent_crossings(self) -> list[float]:
        """Seconds that sending one message of every crossing takes."""
        return crossing_seconds(self.sent_activations, self.sent_gradients)

    def without_transfers(self) -> "PlanSeconds":
        """These seconds with transfers that take no time."""
        none = (0.0,) * len(self.activations)
        return replace(self, activations=none, gradients=none, sent_activations=none, sent_gradients=none)


ONCE = (
    "reduce_seconds",
    "tied_seconds",
    "update_seconds",
    "update_copies_seconds",
    "once_seconds",
    "gather_seconds",
    "deferred_seconds",
)
"""Terms of what happens once per batch."""


def plan_seconds(plan: Plan, terms: Sequence[Mapping[str, float]]) -> PlanSeconds:
    """How long everything in a plan takes.

    Terms are those that :class:`~lightning_mist.plan.PredictedStage` has in its ``breakdown``; one that is missing
    takes no time.
    """
    groups = plan.num_groups
    once = [
        # What a group of devices does once per batch it does for all its chunks, but only one loop runs for all.
        {
            name: (max if name == "once_seconds" else sum)(term.get(name, 0.0) for term in terms[group::groups])
            for name in ONCE
        }
        for group in range(groups)
    ]
    stages = tuple(_stage_seconds(term, once[index % groups]) for index, term in enumerate(terms))
    return PlanSeconds(
        stages=stages,
        activations=tuple(term.get("arrival_seconds", 0.0) for term in terms[1:]),
        gradients=tuple(term.get("return_seconds", 0.0) for term in terms[:-1]),
        sent_activations=tuple(term.get("send_seconds", 0.0) for term in terms[:-1]),
        sent_gradients=tuple(term.get("send_back_seconds", 0.0) for term in terms[1:]),
    )


def _stage_seconds(term: Mapping[str, float], once: Mapping[str, float]) -> ActionSeconds:
    """A stage's actions from its terms, and from those of its group of what happens once per batch."""

    def of(name: str, other: float = 0.0) -> float:
        return term.get(f"{name}_seconds", other)

    # Plans of older versions know the mean of a batch only.
    half, parts = of("unshard") / 2, ("ring", "copies", "overhead")
    forward = of("forward") + of("forward_unshard", half) + sum(of(f"forward_{name}") for name in parts)
    backward = of("backward") + of("recompute") + of("backward_unshard", half) + of("scatter")
    backward += sum(of(name) - of(f"forward_{name}") for name in parts)
    # What of an update waits for no input is counted behind the last backward, as it comes between the two.
    update, gather = once["update_seconds"] + once["update_copies_seconds"], once["gather_seconds"]
    deferred = once["deferred_seconds"]
    return ActionSeconds(
        forward=forward,
        backward=backward,
        first_forward=forward + of("begin") + of("deferred"),
        forward_again=of("forward_again"),
        backward_again=of("backward_again"),
        first_backward=max(0.0, backward - of("accumulate")),
        weight=of("weight"),
        reduce=once["reduce_seconds"],
        reduce_tied=once["tied_seconds"],
        step=max(update - deferred, 0.0) + once["once_seconds"],
        gather=min(max(update + gather - deferred, 0.0), gather),
    )


def predicted_terms(plan: Plan) -> list[dict[str, float]]:
    """The terms of each stage of a plan's prediction; of predictions without terms, what is known as a whole.

    Without terms of the update ``STEP`` takes the stage's boundary time. Without those of single transfers, what a
    stage waits for on its receives is the time of its links: on the first and last stage of the one it receives from,
    on others half of it each. Without those of sending a sender takes as long as its receiver. ``W`` takes, if nothing
    else is known, as long as the forward, but at most half of the backward: each of the two gradients of a matrix
    product takes as long as the product (Qi et al., 2023, table 1).

    Raises:
        PlanError: If nothing was predicted.
    """
    if plan.predicted is None:
        raise PlanError(
            "the plan has no predicted seconds: a simulation needs those of every stage; give a plan that "
            "`lightning-mist plan` or a fit wrote"
        )
    result = []
    for index, stage in enumerate(plan.predicted.stages):
        term = dict(stage.breakdown)
        recompute = term.get("recompute_seconds", 0.0)
        term["forward_seconds"] = stage.forward_seconds
        term["backward_seconds"] = stage.backward_seconds - recompute
        if not any(term.get(name, 0.0) for name in ONCE):
            term["update_seconds"] = stage.boundary_seconds
        if "arrival_seconds" not in term:
            wait = term.get("transfer_seconds", 0.0)
            share = wait / 2 if 0 < index < plan.num_stages - 1 else wait
            term["arrival_seconds"] = term["return_seconds"] = share
        term.setdefault("weight_seconds", min(stage.forward_seconds, stage.backward_seconds / 2))
        result.append(term)
    for before, behind in pairwise(result):
        before.setdefault("send_seconds", behind["arrival_seconds"])
        behind.setdefault("send_back_seconds", before["return_seconds"])
    return result
