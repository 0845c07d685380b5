"""What a stage has in memory around each of its computations, read off its lowered schedule.

The memory model asks no formula how many microbatches are in flight: it walks the very list of actions that the runtime
executes and keeps the situations that no other situation dominates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_mist.plan import ScheduleName
from lightning_mist.schedule import Action, ActionKind, arrived_sends
from lightning_mist.schedule.action import COMPUTATIONS, INPUT_BACKWARDS
from lightning_mist.schedule.lowering import add_transfers
from lightning_mist.schedule.orders import generate_orders

PhaseKind = Literal["forward", "first backward", "backward", "input backward", "weight backward", "transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The situation around one forward or backward, or while it waits for what it receives.

    Attributes:
        kind: What is computed; the first backward of a batch is the one that makes the gradients. Where input and
            weight gradients are apart, the latter do. ``"transfer"`` if nothing is: what was sent before has not been
            let go of yet.
        gradients: Whether all parameter gradients exist when it begins.
        others: Other microbatches whose forward has run and whose backward (or input gradients) have not.
        waiting: Other microbatches whose input gradients are there and whose weight gradients are not.
        received: Receive buffers of activations: of every microbatch in flight and those posted ahead.
        received_gradients: Receive buffers of output gradients.
        sent_gradients: Input gradients whose send is not yet known to have ended.
        sent_activations: Outputs of which the same is true.
    """

    kind: PhaseKind
    gradients: bool
    others: int
    waiting: int
    received: int
    received_gradients: int
    sent_gradients: int
    sent_activations: int = 0

    @property
    def size(self) -> int:
        """How much exists in it, all things counted alike."""
        counts = (self.others, self.waiting, self.received, self.received_gradients)
        return self.gradients + sum(counts) + self.sent_gradients + self.sent_activations

    def dominates(self, other: "Phase") -> bool:
        """Whether everything of the other situation exists in this one too."""
        # An input backward that finds no gradients makes some, which may be more than there are later (ZeRO-2).
        comparable = self.kind != "input backward" or self.gradients == other.gradients
        return (
            self.kind == other.kind
            and comparable
            and self.gradients >= other.gradients
            and self.others >= other.others
            and self.waiting >= other.waiting
            and self.received >= other.received
            and self.received_gradients >= other.received_gradients
            and self.sent_gradients >= other.sent_gradients
            and self.sent_activations >= other.sent_activations
        )


def stage_phases(
    stage_index: int, num_stages: int, num_microbatches: int, schedule: ScheduleName = "1f1b"
) -> tuple[Phase, ...]:
    """The situations of a stage that are not dominated by others."""
    # 1F1B and ZB-H1 repeat themselves once every stage is in its steady state; GPipe never does.
    if schedule == "1f1b" and stage_index > 1:
        # A stage with others on both sides depends on those behind it only.
        stage_index, num_stages = 1, num_stages - stage_index + 1
    steady = {"gpipe": num_microbatches, "1f1b": num_stages + 3}.get(schedule, 2 * num_stages + 1)
    shown = min(num_microbatches, steady)
    if schedule == "zb-h1" and stage_index == num_stages - 1:
        return _phases_of_last(num_stages, shown)
    return _phases_of_stages(num_stages, shown, schedule)[stage_index]


_NEAR = 3
"""Stages of 1F1B whose lists say all about the first two, and of ZB-H1 all about the last."""


@lru_cache(maxsize=1024)
def _phases_of_last(num_stages: int, num_microbatches: int) -> tuple[Phase, ...]:
    """The situations of the last stage under ZB-H1, which is where most waits for gradients of weights."""
    orders = generate_orders(num_stages, num_microbatches, "zb-h1")
    shift = max(0, num_stages - _NEAR)
    lists = add_transfers(
        tuple(tuple(Action(stage - shift, kind, index) for stage, kind, index in order) for order in orders[shift:])
    )
    walked = phases_in_order(lists[-1], sends_gradients=num_stages > 1, arrivals=arrived_sends(lists)[-1])
    return _not_dominated(list(dict.fromkeys(phase for _, phase in walked)))


@lru_cache(maxsize=1024)
def _phases_of_stages(num_stages: int, num_microbatches: int, schedule: ScheduleName) -> tuple[tuple[Phase, ...], ...]:
    """The situations of every stage; under 1F1B of the first two."""
    result = []
    orders = generate_orders(num_stages, num_microbatches, schedule)
    if schedule == "1f1b":
        # What tells a stage that its sends have arrived is in the lists of its neighbours.
        orders = orders[:_NEAR]
    lists = add_transfers(tuple(tuple(Action(*item) for item in order) for order in orders))
    for stage_index, (actions, arrivals) in enumerate(zip(lists, arrived_sends(lists), strict=True)):
        walked = phases_in_order(actions, sends_gradients=stage_index > 0, arrivals=arrivals)
        found = list(dict.fromkeys(phase for _, phase in walked))
        result.append(_not_dominated(found))
    return tuple(result)


def _not_dominated(found: list[Phase]) -> tuple[Phase, ...]:
    """The situations that no other one dominates, in their order."""
    kept: list[Phase] = []
    # What dominates another has more of something and less of nothing, so it comes first.
    for phase in sorted(found, key=lambda item: -item.size):
        if not any(other.dominates(phase) for other in kept):
            kept.append(phase)
    return tuple(phase for phase in found if phase in kept)


def phases_in_order(
    actions: Sequence[Action], *, sends_gradients: bool, arrivals: Mapping[Action, Sequence[Action]]
) -> Iterator[tuple[Action, Phase]]:
    """The situation at each computation of a list, in its order; before it the one while it waits, if that differs.

    Args:
        arrivals: Which sends each computation finds arrived; see :func:`~lightning_mist.schedule.arrived_sends`.
    """
    open_microbatches, waiting, received, received_gradients, backwards = 0, 0, 0, 0, 0
    sent: set[int | None] = set()
    handed: set[int | None] = set()
    for action in actions:
        if action.kind is ActionKind.RECV_ACTIVATION:
            received += 1
        elif action.kind is ActionKind.RECV_GRADIENT:
            received_gradients += 1
        elif action.kind is ActionKind.SEND_ACTIVATION:
            handed.add(action.microbatch)
        elif action.kind in COMPUTATIONS:
            forward, weights = action.kind is ActionKind.FORWARD, action.kind is ActionKind.BACKWARD_WEIGHT
            arrived = arrivals.get(action, ())
            if arrived:
                held = Phase(
                    kind="transfer",
                    gradients=backwards > 0,
                    others=open_microbatches,
                    waiting=waiting,
                    received=received,
                    received_gradients=received_gradients,
                    sent_gradients=len(sent),
                    sent_activations=len(handed),
                )
                yield action, held
            sent -= {send.microbatch for send in arrived if send.kind is ActionKind.SEND_GRADIENT}
            handed -= {send.microbatch for send in arrived if send.kind is ActionKind.SEND_ACTIVATION}
            yield (
                action,
                Phase(
                    kind=_kind(action.kind, backwards > 0),
                    gradients=backwards > 0,
                    others=open_microbatches - (action.kind in INPUT_BACKWARDS),
                    waiting=waiting - weights,
                    received=received,
                    received_gradients=received_gradients,
                    sent_gradients=len(sent),
                    sent_activations=len(handed),
                ),
            )
            # The whole backward, or its second half, leaves gradients behind.
            backwards += action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
            waiting += (action.kind is ActionKind.BACKWARD_INPUT) - weights
            open_microbatches += forward - (action.kind in INPUT_BACKWARDS)
            if action.kind in INPUT_BACKWARDS:
                received -= min(received, 1)
                received_gradients -= min(received_gradients, 1)
                if sends_gradients:
                    sent.add(action.microbatch)


def _kind(kind: ActionKind, gradients: bool) -> PhaseKind:
    if kind is ActionKind.FORWARD:
        return "forward"
    if kind is ActionKind.BACKWARD_INPUT:
        return "input backward"
    if kind is ActionKind.BACKWARD_WEIGHT:
        return "weight backward"
    return "backward" if gradients else "first backward"
