"""Sizes of language models to plan for, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelShape:
    """Sizes and choices of a decoder-only language model without biases and dropout.

    Attributes:
        ffn: Inner width of the feed-forward part.
        key_value_heads: Heads of keys and values, a divisor of ``heads``, made by matrices of their own; ``None`` for
            as many as of queries, made by one matrix together with these.
        feed_forward: ``"gelu"`` (two matrices) or ``"swiglu"`` (three; Shazeer, 2020).
        parallel: Whether attention and feed-forward read the same norm and are added together (Wang and Komatsuzaki,
            2021).
        rotary_fraction: Part of each head that is rotated by position (Su et al., 2021); 0 for a table of learned
            positions.
        tied: Whether the head is the token table.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    parallel: bool = False
    rotary_fraction: float = 0.0
    tied: bool = False

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def rotated_width(self) -> int:
        """Entries of each head that are rotated by position."""
        return int(self.head_width * self.rotary_fraction) // 2 * 2

    @property
    def key_value_width(self) -> int:
        """Width of all keys, or all values, together."""
        return (self.key_value_heads or self.heads) * self.head_width
