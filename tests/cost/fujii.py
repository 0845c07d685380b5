"""Llama's memory under four kinds of parallelism, by the formulas of Fujii, Watanabe and Yokota (arXiv:2411.06465).

With ``t``, ``p``, ``d``, ``c`` tensor-, pipeline-, data- and context-parallel ranks, ``b`` rows of ``s`` tokens per
microbatch, and per parameter 2 bytes of weight, 4 of gradient and 12 of optimizer state, these shared out over ``d c``,

    static      (6 + 12 / (d c)) (v h / t + (2 L / p) h^2 ((1 + k / a + 3 f / (2 h)) / t + 1 / h))
    activations s b / c (h / t ((12 + 4 k / a + 8 f / h) L + 4 (1 + v / h)) + 8 p)

The first stage keeps ``p`` microbatches of ``L / p`` layers: ``L`` layers whatever ``p`` is, with ``n`` chunks per rank
``1 + (p - 1) / (p n)`` times as many (Korthikanti et al., 2022). Without a pipeline both tables of tokens are on the
one stage. Sequence parallelism is assumed wherever ``t > 1``. In all of their 454 runs a sum of at most 0.8 of the
device's memory fitted: whatever the formulas leave out was less than the rest.

With experts, of which ``e`` ranks hold a part each, every layer has all their matrices in place of one feed-forward
part, divided by ``t e``, with optimizer state over the ``d c / e`` ranks that hold the same; a token's activations are
those of the experts that it is sent to, evenly (the authors' calculator, which came later, divides so).

``8 p`` are the ids of tokens, 8 bytes each. A published transcription has them inside of the bracket that ``h``
multiplies, which is ``h`` times as much; ``literal`` reproduces it.
"""

from dataclasses import dataclass

from lightning_mist.estimate.transformer_sizes import TransformerDims

SAFE_SHARE = 0.8
"""Share of a device's memory up to which an estimate has never run out (arXiv:2411.06465, abstract)."""

_WEIGHT_AND_GRADIENT, _OPTIMIZER = 6, 12
"""Bytes per parameter: bfloat16 weight and 32-bit gradient; 32-bit weight, momentum and variance of Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many devices share what.

    Attributes:
        tensor, pipeline, data, context: Ranks of each kind.
        chunks: Stages on each rank under an interleaved schedule.

    Raises:
        ValueError: If one is below 1.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        """Check degrees."""
        for name in ("tensor", "pipeline", "data", "context", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least one rank is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of every feed-forward part.

    Attributes:
        count: Experts of a layer.
        per_token: Experts that each token is sent to.
        ffn: Inner width of one.
        ranks: Ranks that hold a part of them each (``e``), among data- and context-parallel ones.

    Raises:
        ValueError: If numbers do not go together.
    """

    count: int
    per_token: int
    ffn: int
    ranks: int = 1

    def __post_init__(self) -> None:
        """Check numbers."""
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"per_token = {self.per_token}: a token is sent to 1 to {self.count} experts")
        if self.ranks < 1 or self.count % self.ranks:
            raise ValueError(f"ranks = {self.ranks}: they must share {self.count} experts equally")


@dataclass(frozen=True, slots=True, kw_only=True)
class FujiiEstimate:
    """Bytes on the first stage's device.

    Attributes:
        static_bytes: Weights, gradients and optimizer state.
        activation_bytes: What is kept for backward, and the scores.
    """

    static_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        """Both."""
        return self.static_bytes + self.activation_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device of so much memory never ran out (the rule of 80 %).

        Raises:
            ValueError: If the memory is not positive.
        """
        if memory_bytes <= 0:
            raise ValueError(f"memory_bytes = {memory_bytes}: a device has more than none")
        return self.total_bytes <= SAFE_SHARE * memory_bytes


def fujii_estimate(
    dims: TransformerDims,
    degrees: Degrees = Degrees(),
    *,
    microbatch_size: int,
    sequence_length: int,
    experts: Experts | None = None,
    literal: bool = False,
) -> FujiiEstimate:
    """What the formulas say.

    Args:
        dims: Sizes; choices beyond those of Llama are not looked at.
        degrees: How the network is shared out.
        microbatch_size: Rows of a microbatch.
        sequence_length: Tokens of a row.
        experts: What stands in place of the feed-forward parts, if something does.
        literal: Whether to count ids of tokens as the published transcription does.

    Raises:
        ValueError: If more ranks share experts than there are, or they do not divide them.
    """
    h, v, layers = dims.hidden, dims.vocabulary, dims.layers
    t, p, c = degrees.tensor, degrees.pipeline, degrees.context
    share, shards = dims.groups / dims.heads, degrees.data * c
    ranks = experts.ranks if experts is not None else 1
    if shards % ranks:
        raise ValueError(f"ranks = {ranks}: they must divide the {shards} data- and context-parallel ranks")
    # Inner width over hidden width: of all parameters, and of what one token passes through.
    held = dims.ffn / h if experts is None else experts.count * experts.ffn / h
    passed = dims.ffn / h if experts is None else experts.per_token * experts.ffn / h
    tables = v * h / t if p > 1 else 2 * v * h / t + h
    dense = tables + 2 * layers / p * h**2 * ((1 + share) / t + 1 / h)
    inner = 3 * layers / p * h**2 * held / (t * ranks)
    static = (_WEIGHT_AND_GRADIENT + _OPTIMIZER / shards) * dense
    static += (_WEIGHT_AND_GRADIENT + _OPTIMIZER * ranks / shards) * inner
    interleaved = 1 + (p - 1) / (p * degrees.chunks) if degrees.chunks > 1 else 1.0
    kept = (12 + 4 * share + 8 * passed) * layers * interleaved + 4 * (1 + v / h)
    tokens = microbatch_size * sequence_length / c
    ids = 8 * p * (h / t if literal else 1)
    return FujiiEstimate(static_bytes=static, activation_bytes=tokens * (h / t * kept + ids))
