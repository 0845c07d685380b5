"""What the chunks of a group of devices have in memory around each of their computations, as counts.

All of it is read off the very list of actions that the devices run. One situation after the other the counts are a
matrix, so that what all of them take is one product with the bytes of each chunk.

Array axes
    X  situations
    G  chunks of a group, in order
    F  what is counted: saved microbatches of every chunk, then activations received, gradients received, gradients
       sent, activations sent, and gradients of parameters
    W  working sets: of a forward of every chunk, then of its first backward, then of others
    K  candidates
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray, IntArray
from lightning_mist.cost.memory.stage_bytes import StageNeeds
from lightning_mist.schedule import Action, ActionKind, arrived_sends, generate
from lightning_mist.schedule.lowering import add_transfers

Situation = tuple[int, bool, frozenset[int], tuple[tuple[str, int, int], ...]]
"""Stage that computes, whether forward, stages whose gradients exist, and what there is of every stage: kind, stage and
number."""

COUNTED = {
    "others": "saved_K",
    "received": "entering_K",
    "gradients": "leaving_K",
    "sent": "returned_K",
    "handed": "handed_K",
}
"""What of a stage's needs is there as often as a situation counts, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """All situations of a group of devices.

    Attributes:
        counts_XF: How often each thing is there.
        made_XG: Of which chunks gradients are there, and perhaps still under way.
        accumulates_X: The chunk whose backward adds to gradients and so counts its own as under way; -1 if none.
        in_flight_G: The most microbatches of every chunk whose activations are kept at once.
    """

    counts_XF: FloatArray
    working_X: IntArray
    made_XG: BoolArray
    accumulates_X: IntArray
    in_flight_G: IntArray

    def bytes(self, needs: Sequence[StageNeeds]) -> FloatArray:
        """What changes over a batch, in every situation; axes ``XK``."""
        counted = [getattr(item, name) for name in (*COUNTED.values(), "gradients_K") for item in needs]
        working = [item.forward_K for item in needs]
        working += [item.first_backward_K for item in needs]
        working += [item.backward_K + item.gradients_K + item.reused_K for item in needs]
        found_XK: FloatArray = self.counts_XF @ np.stack(counted) + np.stack(working)[self.working_X]
        pending_GK = np.stack([item.pending_K for item in needs])
        if pending_GK.any():
            most_XK = np.where(self.made_XG[:, :, None], pending_GK, 0.0).max(axis=1)
            own_XK = np.where(self.accumulates_X[:, None] >= 0, pending_GK[self.accumulates_X], 0.0)
            found_XK = found_XK + np.maximum(0.0, most_XK - own_XK)
        return found_XK


@lru_cache(maxsize=256)
def counts_of_groups(num_stages: int, num_groups: int, num_microbatches: int) -> tuple[Counts, ...]:
    """The situations of every group of devices under interleaved 1F1B, as counts; see :func:`situations_of_groups`."""
    every = situations_of_groups(num_stages, num_groups, num_microbatches)
    return tuple(_counts(found, range(group, num_stages, num_groups)) for group, found in enumerate(every))


def _counts(situations: Sequence[Situation], chunks: Sequence[int]) -> Counts:
    place, kinds = {stage: chunk for chunk, stage in enumerate(chunks)}, {kind: n for n, kind in enumerate(COUNTED)}
    counts_XF = np.zeros((len(situations), (len(kinds) + 1) * len(chunks)))
    made_XG = np.zeros((len(situations), len(chunks)), dtype=bool)
    working_X, accumulates_X = np.zeros(len(situations), dtype=np.int64), np.full(len(situations), -1)
    in_flight_G = np.zeros(len(chunks), dtype=np.int64)
    for index, (stage, is_forward, made, counts) in enumerate(situations):
        others = [0] * len(chunks)
        for kind, at, number in counts:
            counts_XF[index, kinds[kind] * len(chunks) + place[at]] = number
            others[place[at]] += number * (kind == "others")
        for at in made:
            made_XG[index, place[at]] = True
            counts_XF[index, len(kinds) * len(chunks) + place[at]] = is_forward or at != stage
        accumulates = not is_forward and stage in made
        accumulates_X[index] = place[stage] if accumulates else -1
        working_X[index] = place[stage] + len(chunks) * (0 if is_forward else 1 + accumulates)
        others[place[stage]] += 1
        in_flight_G = np.maximum(in_flight_G, others)
    return Counts(
        counts_XF=counts_XF, working_X=working_X, made_XG=made_XG, accumulates_X=accumulates_X, in_flight_G=in_flight_G
    )


@lru_cache(maxsize=256)
def situations_of_groups(num_stages: int, num_groups: int, num_microbatches: int) -> tuple[tuple[Situation, ...], ...]:
    """The situations around the computations of every group of devices."""
    lists = add_transfers(generate(num_stages, num_microbatches, "interleaved-1f1b", num_groups=num_groups))
    arrivals = arrived_sends(lists)
    return tuple(
        tuple(dict.fromkeys(situation for _, situation in situations_in_order(actions, arrivals[group])))
        for group, actions in enumerate(lists)
    )


def situations_in_order(
    actions: Sequence[Action], arrivals: Mapping[Action, Sequence[Action]]
) -> list[tuple[Action, Situation]]:
    """The situation around each computation of a list, in its order.

    Args:
        arrivals: Which sends each computation finds arrived; see :func:`~lightning_mist.schedule.arrived_sends`.
    """
    found: list[tuple[Action, Situation]] = []
    there: Counter[tuple[str, int]] = Counter()
    made: set[int] = set()
    receives = {ActionKind.RECV_ACTIVATION: "received", ActionKind.RECV_GRADIENT: "gradients"}
    sends = {ActionKind.SEND_GRADIENT: "sent", ActionKind.SEND_ACTIVATION: "handed"}
    sent: dict[Action, tuple[str, int]] = {}
    for action in actions:
        stage = action.stage
        if action.kind in receives:
            there[receives[action.kind], stage] += 1
        elif action.kind in sends:
            sent[action] = (sends[action.kind], stage)
            there[sent[action]] += 1
        elif action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            is_forward = action.kind is ActionKind.FORWARD
            for send in arrivals.get(action, ()):
                if send in sent:
                    there[sent.pop(send)] -= 1
            if not is_forward:
                # The saved bytes of the microbatch at hand, and the gradient where its output was, are in its working.
                there["others", stage] -= 1
                there["gradients", stage] -= there["gradients", stage] > 0
            counts = tuple((kind, at, n) for (kind, at), n in sorted(there.items()) if n)
            found.append((action, (stage, is_forward, frozenset(made), counts)))
            if is_forward:
                there["others", stage] += 1
            else:
                made.add(stage)
                there["received", stage] -= there["received", stage] > 0
    return found
