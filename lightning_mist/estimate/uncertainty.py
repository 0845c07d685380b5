"""How sure predictions of bytes are, from how far off they were where somebody looked.

A *record* holds predictions beside what was measured. Of a row with relative error ``e`` (predicted over measured, less
one) the need was ``1 / (1 + e)`` of the prediction. The middle of these factors and the one that 95 of 100 rows stay
below are the *spread* of such predictions; :data:`SPREADS` has those of committed records.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Interval:
    """Bytes that are as likely too many as too few, and bytes that suffice in 95 of 100 cases."""

    p50: int
    p95: int

    def __post_init__(self) -> None:
        """Check the order."""
        if not 0 <= self.p50 <= self.p95:
            raise ValueError(f"p50 = {self.p50}, p95 = {self.p95}: bytes are not negative, and p95 is at least p50")

    def risk(self, limit: float) -> float:
        """The share of cases that need more than a limit, of a normal distribution with these two quantiles."""
        if self.p95 == self.p50:
            return float(self.p50 > limit)
        return 1 - NormalDist(self.p50, (self.p95 - self.p50) / NormalDist().inv_cdf(0.95)).cdf(limit)


Quantity: TypeAlias = Literal[
    "allocated", "reserved", "reserved over allocated", "summed", "summed reserved", "closed form"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors from what is predicted to what is needed.

    Attributes:
        middle: Half of the needs lay below this many times the prediction.
    """

    middle: float
    high: float
    source: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the order."""
        if not 0 < self.middle <= self.high:
            raise ValueError(f"middle = {self.middle}, high = {self.high}: 0 < middle <= high")

    @property
    def low(self) -> float:
        """The factor that 95 of 100 needs lie above, if they lie as far below the middle as above it."""
        return self.middle**2 / self.high

    def of(self, nbytes: float) -> Interval:
        """The interval of a prediction: it is the middle where its error has no direction to speak of."""
        return Interval(p50=round(nbytes * self.middle), p95=round(nbytes * self.high))


_EXECUTED_STAGES = (
    "26 stages of executed pipelines, artifact of Mist (Dazz993/Mist at d69e530): mean 1.12, 1.06 to 1.23",
)

_SUMMED = ("summed-needs_amd-epyc-2-cores_202611",)

SPREADS: dict[Quantity, Spread] = {
    # Tensors of plans that this runtime executed, as the meter saw them; rounded up to a hundredth.
    "allocated": Spread(
        middle=1.0,
        high=1.01,
        source=("accuracy_amd-epyc-2-cores_202611", "memory-limits_amd-epyc-2-cores_202611"),
    ),
    # Replayed through the allocator: no worse than not to replay at all. Replays of other runtimes came within 0.01
    # (``benchmarks.accuracy.published_memory``), but no run of this one on a CUDA device has been recorded yet.
    "reserved": Spread(middle=1.0, high=1.23 / 1.12, source=_EXECUTED_STAGES),
    # Not replayed.
    "reserved over allocated": Spread(middle=1.12, high=1.23, source=_EXECUTED_STAGES),
    # Sums where no replay is possible, from how far sums are off where one is. Tensors: at most 1.02 times the sums,
    # and of smaller networks in single precision once 1.06 times. Reserved: 1.12 times in the middle and 1.26 times in
    # 95 of 100 cases; with the replay's own spread, independent of it, 1.12 + hypot(1.26 - 1.12, 1.23 - 1.12) = 1.30.
    "summed": Spread(middle=1.0, high=1.06, source=_SUMMED),
    "summed reserved": Spread(middle=1.12, high=1.30, source=_SUMMED + _EXECUTED_STAGES),
    # In none of 454 runs did all that formulas leave out exceed a fifth of the device.
    "closed form": Spread(middle=1.0, high=1.25, source=("Fujii, Watanabe, Yokota, 2024, arXiv 2411.06465",)),
}
"""Spreads of predictions by quantity."""
