"""What devices have at once over a batch, counted along the very list of actions that they run.

An action brings something, takes something, and has something of its own while it runs; all of it is named as in
:class:`~lightning_mist.cost.memory.stage_bytes.StageNeeds`. Summed up along the list this says how often each thing is
there around every computation: the *moments* of the batch. Bytes are these counts times what one of each needs, so the
peak of any number of candidates is the largest entry of one product of matrices. Of moments only those are kept that no
other one exceeds, as needs are never negative.

Devices that run several stages, the chunks of interleaved 1F1B, count the things of each of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_mist.cost.inputs import FloatArray
from lightning_mist.plan import ScheduleName
from lightning_mist.schedule import Action, ActionKind, arrived_sends
from lightning_mist.schedule.lowering import add_transfers
from lightning_mist.schedule.orders import generate_orders

COUNTED = {
    "gradients": "gradient_bytes",
    "reused": "gradient_bytes",
    "pending": "gradient_bytes",
    "saved": "activation_bytes",
    "handed": "transfer_bytes",
    "entering": "transfer_bytes",
    "leaving": "transfer_bytes",
    "returned": "transfer_bytes",
    "forward": "working_bytes",
    "first_backward": "working_bytes",
    "backward": "working_bytes",
    "input_backward": "working_bytes",
    "waiting": "activation_bytes",
    "weight_backward": "working_bytes",
    "together": "gradient_bytes",
    "under_way": "gradient_bytes",
}
"""What is counted, and the term that it belongs to."""

_POSTED = {
    ActionKind.RECV_ACTIVATION: "entering",
    ActionKind.RECV_GRADIENT: "leaving",
    ActionKind.SEND_ACTIVATION: "handed",
    ActionKind.SEND_GRADIENT: "returned",
}
"""What a transfer has: what is received until a backward has used it, what is sent until it has arrived for sure."""


class _Computation(NamedTuple):
    """What changes with a computation.

    Attributes:
        taken: What its working set has in it of its microbatch, if it was there; gone when it ends.
        first: What is there while it runs, before its stage has made gradients.
        later: The same from then on.
        left: What it leaves behind, but for gradients.
        makes_gradients: Whether its stage has gradients of parameters from then on, those of all microbatches.
    """

    taken: tuple[str, ...]
    first: Mapping[str, int]
    later: Mapping[str, int]
    left: Mapping[str, int]
    makes_gradients: bool = False


_COMPUTED = {
    ActionKind.FORWARD: _Computation((), {"forward": 1}, {"forward": 1}, {"saved": 1}),
    ActionKind.BACKWARD: _Computation(
        # The gradient at hand stands where the output was.
        ("saved", "leaving"),
        {"first_backward": 1},
        # A parameter that two parts use gets its two contributions summed before they are accumulated; and of what is
        # under way its own stage's is in the working set.
        {"backward": 1, "reused": 1, "pending": -1},
        {"entering": -1},
        makes_gradients=True,
    ),
    ActionKind.BACKWARD_INPUT: _Computation(
        ("saved", "leaving"),
        {"input_backward": 1, "together": 1},
        {"input_backward": 1},
        {"entering": -1, "waiting": 1},
    ),
    # Weight gradients are there when the first of them have been made.
    ActionKind.BACKWARD_WEIGHT: _Computation(
        ("waiting",), {"weight_backward": 1, "gradients": 1}, {"weight_backward": 1}, {}, makes_gradients=True
    ),
}


class Moment(NamedTuple):
    """A computation, or a wait for what it consumes.

    Attributes:
        kind: What is computed, in words; the first backward of a batch is the one that makes the gradients.
            ``"transfer"`` if nothing is: what was sent before has not been let go of yet.
        counts: How often each thing is there, in the order of :data:`COUNTED`, of chunk after chunk.
    """

    kind: str
    counts: tuple[int, ...]


Moments: TypeAlias = tuple[Moment, ...]


def device_moments(
    group: int, num_stages: int, num_microbatches: int, schedule: ScheduleName = "1f1b", num_groups: int | None = None
) -> Moments:
    """The moments of a group of devices, of as many as there are stages but where a group runs several."""
    if schedule == "1f1b" and group > 1:
        # A stage with others on both sides depends on those behind it only.
        group, num_stages, num_groups = 1, num_stages - group + 1, None
    first, end = 0, num_stages if num_groups is None else num_groups
    # All but GPipe repeat themselves once every stage is in its steady state.
    steady = {
        "gpipe": num_microbatches,
        "1f1b": num_stages + 3,
        "zb-h1": 2 * num_stages + 1,
        # Warm-up takes at most two rounds, and by the end of the fourth every stage has made its gradients.
        "interleaved-1f1b": 4 * end,
    }
    shown = num_stages, min(num_microbatches, steady[schedule]), schedule, end
    # What tells a stage that its sends have arrived is in the lists of its neighbours.
    if schedule == "1f1b":
        end = 3
    elif schedule == "zb-h1" and group == end - 1:
        first = max(0, end - 3)
    return _moments(*shown, first, end)[group - first]


@lru_cache(maxsize=1024)
def _moments(
    num_stages: int, num_microbatches: int, schedule: ScheduleName, num_groups: int, first: int, end: int
) -> tuple[Moments, ...]:
    """The moments of some neighbouring groups of devices."""
    orders = generate_orders(num_stages, num_microbatches, schedule, num_groups=num_groups)[first:end]
    lists = add_transfers(
        tuple(tuple(Action(stage - first, kind, index) for stage, kind, index in order) for order in orders)
    )
    result = []
    for actions, arrivals in zip(lists, arrived_sends(lists), strict=True):
        found: list[Moment] = []
        for action, waiting, computing in moments_in_order(actions, arrivals):
            found += [waiting, computing] if action in arrivals else [computing]
        result.append(_largest(found))
    return tuple(result)


def _largest(moments: Iterable[Moment]) -> Moments:
    """The moments of which no other one has as much of everything, in their order."""
    found = tuple(dict.fromkeys(moments))
    counts_by_thing = np.array([moment.counts for moment in found], dtype=np.int32).T.copy()
    kept, exceeds = [], np.ones(len(found), dtype=bool)
    # What exceeds another comes first, as it has more in all.
    for index in np.argsort(-counts_by_thing.sum(axis=0), kind="stable").tolist():
        if exceeds[index]:
            kept.append(index)
            exceeds &= (counts_by_thing > counts_by_thing[:, index : index + 1]).any(axis=0)
    return tuple(found[index] for index in sorted(kept))


def moments_in_order(
    actions: Sequence[Action], arrivals: Mapping[Action, Sequence[Action]]
) -> Iterator[tuple[Action, Moment, Moment]]:
    """The moments before and in each computation of a list, in its order.

    Args:
        arrivals: Which sends each computation finds arrived; see :func:`~lightning_mist.schedule.arrived_sends`.
    """
    there = {stage: dict.fromkeys(COUNTED, 0) for stage in sorted({action.stage for action in actions})}

    def moment(kind: str) -> Moment:
        return Moment(kind, tuple(chain.from_iterable(map(dict.values, there.values()))))

    for action in actions:
        kind, own = action.kind, there[action.stage]
        if kind in _POSTED:
            own[_POSTED[kind]] += 1
        if (row := _COMPUTED.get(kind)) is None:
            continue
        waiting = moment("transfer")
        for send in arrivals.get(action, ()):
            there[send.stage][_POSTED[send.kind]] -= 1
        for name in row.taken:
            own[name] = max(0, own[name] - 1)
        working = row.later if own["gradients"] else row.first
        for name, number in working.items():
            own[name] += number
        yield action, waiting, moment(next(iter(working)).replace("_", " "))
        for name, number in working.items():
            own[name] -= number
        for name, number in row.left.items():
            own[name] = max(0, own[name] + number)
        if row.makes_gradients and not own["gradients"]:
            own["gradients"] = 1
            for stage, things in there.items():
                things["under_way"] = int(stage == action.stage)


_SAVED, _FORWARD = map(list(COUNTED).index, ("saved", "forward"))


def in_flight(moments: Moments, chunk: int = 0) -> int:
    """The most microbatches whose activations a device keeps, of one of its stages."""
    first = chunk * len(COUNTED)
    return max(counts[first + _SAVED] + counts[first + _FORWARD] for _, counts in moments)


@lru_cache(maxsize=4096)
def counts_of(moments: Moments) -> FloatArray:
    """How often everything is there; axes moment and thing."""
    return np.array([moment.counts for moment in moments], dtype=np.float64)
