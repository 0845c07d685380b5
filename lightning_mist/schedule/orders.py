"""The order of forwards and backwards of every group of devices, for each pipeline schedule.

``G`` microbatches, ``S`` stages, ``P`` groups of devices, ``F`` and ``B`` the seconds of a stage's forward and
backward; bubbles are those of equal stages without transfers.

``"gpipe"`` (Huang et al., 2019) runs all forwards, then all backwards; every microbatch is in flight at once.

``"1f1b"`` (Narayanan et al., 2019, PipeDream-flush) lets stage ``i`` run ``min(S - i - 1, G)`` warm-up forwards, then
one forward and one backward in turn, then the backwards that remain. Both leave every device idle for
``(S - 1) (F + B)``; 1F1B holds at most ``min(S - i, G)`` microbatches.

``"interleaved-1f1b"`` (Narayanan et al., 2021, Megatron-LM, section 2.2.2) gives group ``i`` the ``V = S / P`` stages
``i``, ``i + P``, ``i + 2 P``.., its chunks. Forwards take ``P`` microbatches through chunk after chunk, then the next
``P``; backwards do the same from the last chunk. Group ``i`` warms up with ``min(2 (P - i - 1) + (V - 1) P, G V)``
forwards and holds at most one chunk's microbatch more. Its bubble is ``(P - 1) (F + B)`` with ``F`` and ``B`` of one
chunk: ``V`` times less than 1F1B's over the same devices.

``"zb-h1"`` (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.2 and figure 3) is 1F1B whose backward ``B``
is split into ``I``, the gradients of the input, on which the stage before waits, and ``W``, those of the weights, for
which nobody waits. Stage ``i`` runs ``W`` of a microbatch ``i`` microbatches later, and while it drains. For ``G >= S``
and ``F = I = W`` its bubble is ``(S - 1) (F + I - W)``. At most ``S - i`` microbatches wait for their ``I`` and at most
``i + 1`` for their ``W``, on every stage at most the ``S`` microbatches that 1F1B's first stage holds.
"""

from lightning_mist.plan import ScheduleName
from lightning_mist.plan.plan import SCHEDULES
from lightning_mist.schedule.action import Action, ActionKind, Schedule

Order = tuple[tuple[int, ActionKind, int], ...]
"""What a group of devices computes, in order: stage, kind and microbatch of each action."""


def generate(
    num_stages: int, num_microbatches: int, name: ScheduleName = "1f1b", *, num_groups: int | None = None
) -> Schedule:
    """The forwards and backwards of every group of devices in order, nothing else.

    Args:
        num_groups: Number of groups of devices that share the stages; as many as stages if None. Only
            ``"interleaved-1f1b"`` gives a group several stages.

    Returns:
        One tuple of actions per group, each with every ``F`` and every ``B`` of its stages once; for ``"zb-h1"``
        every ``F``, ``I`` and ``W``.

    Raises:
        ValueError: If a count is below 1, the name is not known, or the counts do not fit the schedule.
    """
    orders = generate_orders(num_stages, num_microbatches, name, num_groups=num_groups)
    return tuple(tuple(Action(*item) for item in order) for order in orders)


def generate_orders(
    num_stages: int, num_microbatches: int, name: ScheduleName = "1f1b", *, num_groups: int | None = None
) -> tuple[Order, ...]:
    """As :func:`generate`, as plain tuples, which are made faster."""
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(
            f"num_stages = {num_stages}, num_microbatches = {num_microbatches}: both must be at least 1 to make a "
            "schedule"
        )
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r}: known schedules are {', '.join(SCHEDULES)}")
    groups = num_stages if num_groups is None else num_groups
    if name == "interleaved-1f1b":
        if groups < 1 or num_stages % groups or num_microbatches % groups:
            raise ValueError(
                f"interleaved-1f1b with num_groups = {groups}, num_stages = {num_stages}, num_microbatches = "
                f"{num_microbatches}: stages and microbatches must be multiples of the groups"
            )
        return tuple(_interleaved(group, groups, num_stages // groups, num_microbatches) for group in range(groups))
    if groups != num_stages:
        raise ValueError(
            f"{name} with num_groups = {groups}, num_stages = {num_stages}: only interleaved-1f1b gives a group of "
            "devices several stages"
        )
    if name == "zb-h1":
        return tuple(_zero_bubble(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return tuple(
        _stage(stage, num_microbatches if name == "gpipe" else num_stages - stage - 1, num_microbatches)
        for stage in range(num_stages)
    )


def _stage(stage: int, warm_up: int, num_microbatches: int) -> Order:
    warm_up = min(warm_up, num_microbatches)
    forward, backward = ActionKind.FORWARD, ActionKind.BACKWARD
    order = [(stage, forward, index) for index in range(warm_up)]
    for index in range(num_microbatches - warm_up):
        order += [(stage, forward, warm_up + index), (stage, backward, index)]
    order += [(stage, backward, index) for index in range(num_microbatches - warm_up, num_microbatches)]
    return tuple(order)


def _interleaved(group: int, num_groups: int, num_chunks: int, num_microbatches: int) -> Order:
    total, round_length = num_microbatches * num_chunks, num_groups * num_chunks

    def at(kind: ActionKind, number: int) -> tuple[int, ActionKind, int]:
        """The ``number``-th forward or backward of the group."""
        chunk = number // num_groups % num_chunks
        if kind is ActionKind.BACKWARD:
            chunk = num_chunks - 1 - chunk
        return chunk * num_groups + group, kind, number // round_length * num_groups + number % num_groups

    warm_up = min(2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups, total)
    order = [at(ActionKind.FORWARD, number) for number in range(warm_up)]
    for number in range(total - warm_up):
        order += [at(ActionKind.FORWARD, warm_up + number), at(ActionKind.BACKWARD, number)]
    return tuple(order + [at(ActionKind.BACKWARD, number) for number in range(total - warm_up, total)])


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Order:
    order: list[tuple[int, ActionKind, int]] = []
    weights = 0
    for _, kind, microbatch in _stage(stage, num_stages - stage - 1, num_microbatches):
        if kind is ActionKind.FORWARD:
            order.append((stage, kind, microbatch))
            continue
        order.append((stage, ActionKind.BACKWARD_INPUT, microbatch))
        is_draining = microbatch >= num_microbatches - (num_stages - stage - 1)
        if is_draining or microbatch >= stage:
            order.append((stage, ActionKind.BACKWARD_WEIGHT, weights))
            weights += 1
    rest = range(weights, num_microbatches)
    return tuple(order) + tuple((stage, ActionKind.BACKWARD_WEIGHT, microbatch) for microbatch in rest)
