"""How kinds of plans differ, in words."""

from collections.abc import Sequence

from lightning_mist.explain.explanation import Kind


def differences(kind: Kind, other: Kind) -> tuple[str, ...]:
    """What another kind of plan does differently.

    Args:
        kind: The kind that it is compared with.
    """
    found = []
    if other.stages != kind.stages:
        found.append(f"{_stages(other.stages)} in place of {_stages(kind.stages)}")
    if other.tensor != kind.tensor:
        found.append(_tensor(other.tensor))
    if other.zero != kind.zero:
        found.append(f"{_zero(other.zero)} in place of {_zero(kind.zero)}")
    if other.checkpointing != kind.checkpointing:
        found.append("recomputes layers" if other.checkpointing else "recomputes no layer")
    if more := [_state(name) for name in other.offload if name not in kind.offload]:
        found.append(f"offloads {_and(more)}")
    if less := [_state(name) for name in kind.offload if name not in other.offload]:
        found.append(f"does not offload {_and(less)}")
    if other.schedule != kind.schedule and min(kind.stages, other.stages) > 1:  # One stage has no schedule to speak of.
        found.append(f"schedule {other.schedule} in place of {kind.schedule}")
    return tuple(found)


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _tensor(degrees: Sequence[int]) -> str:
    shared = [str(degree) for degree in degrees if degree > 1]
    if not shared:
        return "no tensor parallelism"
    where = "on some stages" if 1 in degrees else ""
    return f"tensor parallelism over {_and(shared)} devices {where}".rstrip()


def _zero(levels: Sequence[int]) -> str:
    return _and(["no ZeRO" if level == 0 else f"ZeRO-{level}" for level in levels])


def _state(name: str) -> str:
    return "optimizer state" if name == "optimizer" else name


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
