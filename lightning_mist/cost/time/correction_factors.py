"""Seconds as runs have corrected them: a profile's factors on regions and on terms of stages.

Measured layers stay the first truth: corrections multiply what is made of them, and say nothing of seconds that follow
from FLOPs and bytes.
"""

from dataclasses import replace

from lightning_mist.cost.time.region_times import RegionSeconds
from lightning_mist.cost.time.stage_seconds import StageSeconds
from lightning_mist.hardware import HardwareProfile, Term, factor_of
from lightning_mist.model.spec import ModelSpec

CORRECTED: tuple[tuple[Term, tuple[str, ...]], ...] = (
    (
        "communication",
        (
            *("transfer", "arrival", "return", "send", "send_back"),
            *("unshard", "scatter", "ring", "forward_ring", "reduce", "tied", "gather"),
        ),
    ),
    ("update", ("update",)),
)
"""Which terms of a stage's seconds a correction multiplies, beside those that are made of regions."""


def computation_factor(spec: ModelSpec, profile: HardwareProfile, term: Term) -> float:
    """The factor on computation in one direction; 1 where layers were not measured."""
    return factor_of(profile.corrections, term) if spec.seconds else 1.0


def corrected_regions(spec: ModelSpec, profile: HardwareProfile, seconds: RegionSeconds) -> RegionSeconds:
    """Seconds of regions, corrected by direction where layers were measured."""
    forward, backward = (computation_factor(spec, profile, term) for term in ("forward", "backward"))
    if forward == backward == 1.0:
        return seconds
    exchange = seconds.exchange
    return replace(
        seconds,
        forward_R=seconds.forward_R * forward,
        backward_R=seconds.backward_R * backward,
        exchange=None if exchange is None else (exchange[0] * forward, exchange[1] * backward),
    )


def corrected_terms(profile: HardwareProfile, seconds: StageSeconds) -> StageSeconds:
    """Seconds of stages whose regions are corrected already, the other terms corrected too."""
    if not profile.corrections:
        return seconds
    return replace(
        seconds,
        **{
            f"{name}_K": getattr(seconds, f"{name}_K") * factor_of(profile.corrections, term)
            for term, names in CORRECTED
            for name in names
        },
    )
