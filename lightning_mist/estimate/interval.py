"""A predicted figure with how sure it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Interval:
    """Bytes that are as likely too many as too few, and bytes that suffice in 95 of 100 cases.

    Attributes:
        p50: The prediction.
        p95: What the need stays below in 95 of 100 cases.
    """

    p50: int
    p95: int

    def __post_init__(self) -> None:
        """Check the order."""
        if not 0 <= self.p50 <= self.p95:
            raise ValueError(f"p50 = {self.p50}, p95 = {self.p95}: bytes are not negative, and p95 is at least p50")
