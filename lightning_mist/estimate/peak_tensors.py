"""The largest tensors alive at a peak, those that are alike counted once."""

import re
from collections.abc import Iterable
from dataclasses import replace

from lightning_mist.errors import ScheduleError
from lightning_mist.estimate.estimate_data import PeakTensor
from lightning_mist.estimate.replay import Alive
from lightning_mist.schedule import Action, ActionKind

SHOWN_TENSORS = 10
"""Tensors of a peak that are kept."""

_NUMBER = re.compile(r"\d+")

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward to inputs",
    ActionKind.BACKWARD_WEIGHT: "gradients of weights",
    ActionKind.RECV_ACTIVATION: "receiving activations",
    ActionKind.SEND_ACTIVATION: "sending activations",
    ActionKind.RECV_GRADIENT: "receiving gradients",
    ActionKind.SEND_GRADIENT: "sending gradients",
    ActionKind.REDUCE_GRADIENTS: "gradient reduction",
    ActionKind.REDUCE_TIED: "tied gradients",
    ActionKind.OPTIMIZER_STEP: "optimizer step",
    ActionKind.GATHER_PARAMETERS: "parameter gathering",
    ActionKind.UNSHARD: "gathering of a layer",
    ActionKind.RESHARD: "freeing of a layer",
}


def phase_in_words(action: str) -> str:
    """An action as a reader wants it: ``"0B3"`` is ``"backward of microbatch 3"``."""
    try:
        parsed = Action.parse(action)
    except ScheduleError:
        return action
    where = "" if parsed.microbatch is None else f" of microbatch {parsed.microbatch}"
    return _WORDS[parsed.kind] + where


def tensors_at_peak(alive: Iterable[Alive], group: int) -> tuple[tuple[PeakTensor, ...], tuple[PeakTensor, ...]]:
    """The largest tensors that are alive, and the kinds of tensors that take most together.

    Tensors that differ in their layer or microbatch alone are of one kind, and are listed once, with their number.

    Args:
        alive: What is alive, the largest first.
        group: The group of devices, which is the stage of what belongs to no other.

    Returns:
        Kinds by the size of one tensor, and kinds by the bytes of all; of each the first :data:`SHOWN_TENSORS`.
    """
    found: dict[tuple[object, ...], PeakTensor] = {}
    counts: dict[tuple[object, ...], int] = {}
    for item in alive:
        tensor = _tensor(item, group)
        alike = _NUMBER.sub("*", tensor.module)
        key = (tensor.bytes, tensor.term, alike, tensor.operator, tensor.line, tensor.dtype)
        found.setdefault(key, tensor)
        counts[key] = counts.get(key, 0) + 1
    kinds = [replace(tensor, count=counts[key]) for key, tensor in found.items()]
    most = sorted(kinds, key=lambda kind: -kind.all_bytes)
    return tuple(kinds[:SHOWN_TENSORS]), tuple(most[:SHOWN_TENSORS])


def _tensor(item: Alive, group: int) -> PeakTensor:
    label = item.label
    named = label.part is None or label.term == "gradient_bytes"
    return PeakTensor(
        bytes=item.nbytes,
        term=label.term,
        stage=group if item.stage is None else item.stage,
        microbatch=item.microbatch,
        module=label.name if named else label.module or label.name,
        operator=label.operator,
        line=label.line,
        dtype=label.dtype,
    )
