"""Sizes of a transformer, as its configuration states them: all that a closed form knows of a network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerDims:
    """Sizes and choices of a decoder-only transformer.

    Attributes:
        hidden: Width of the residual stream (``h``).
        ffn: Inner width of the feed-forward part.
        heads: Query heads (``a``).
        vocabulary: Tokens (``v``).
        key_value_heads: Heads of keys and values (``k``); ``None`` for as many as of queries.
        head_width: Width of a head; ``None`` for ``hidden / heads``.
        positions: Length of a table of learned positions; 0 if there is none.
        norm: ``"rms"`` (a weight) or ``"layer"`` (a weight and a bias).
        feed_forward: ``"swiglu"`` (three matrices; Shazeer, 2020) or ``"gelu"`` (two).
        rotary: Whether queries and keys are rotated by position (Su et al., 2021).
        rotation: How: ``"sum"`` of products with tables that the network makes once, or ``"concatenation"`` of rotated
            parts, with tables that every layer makes.
        rotated_width: Entries of each head that are rotated; ``None`` for all.
        query_key_value_bias, output_bias, feed_forward_bias: Which linear layers have biases.
        fused_query_key_value: Whether one linear layer makes queries, keys and values.
        repeats_key_value: Whether heads of keys and values are copied to as many as of queries ahead of attention.
        composed_norm: Whether root-mean-square norms are composed in Python, as Hugging Face's are: they keep their
            input in 32 bits and, in its own type, what meets their weight.
        composed_gelu: Whether GELU is, as Hugging Face's ``gelu_new``: it keeps three steps between input and result.
        dropout: Probability behind attention and feed-forward part.
        attention_dropout: Probability inside attention.
        embedding_dropout: Probability behind the embedding.
        tied: Whether the head is the table of tokens.

    Raises:
        ValueError: If sizes are not positive or do not divide each other.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    key_value_heads: int | None = None
    head_width: int | None = None
    positions: int = 0
    norm: Literal["rms", "layer"] = "rms"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    rotary: bool = True
    rotation: Literal["sum", "concatenation"] = "sum"
    rotated_width: int | None = None
    query_key_value_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    fused_query_key_value: bool = False
    repeats_key_value: bool = False
    composed_norm: bool = False
    composed_gelu: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        """Check sizes."""
        for name in ("hidden", "ffn", "layers", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a transformer needs at least 1")
        if self.head_width is None and self.hidden % self.heads:
            raise ValueError(
                f"heads = {self.heads} with hidden = {self.hidden}: they must divide it; give head_width if heads are "
                "not equal parts of it"
            )
        if self.heads % self.groups:
            raise ValueError(f"key_value_heads = {self.groups}: it must divide heads = {self.heads}")

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_value_heads or self.heads

    @property
    def query_width(self) -> int:
        """Width of all queries together."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def key_value_width(self) -> int:
        """Width of all keys (or values) together."""
        return self.query_width // self.heads * self.groups

    @property
    def matrices(self) -> tuple[tuple[str, int, int], ...]:
        """Name, inputs and outputs of every matrix of a layer."""
        h, f, q, k = self.hidden, self.ffn, self.query_width, self.key_value_width
        if self.fused_query_key_value:
            projections: tuple[tuple[str, int, int], ...] = (("query_key_value", h, q + 2 * k),)
        else:
            projections = (("query", h, q), ("key", h, k), ("value", h, k))
        inner = (("gate", h, f), ("up", h, f)) if self.feed_forward == "swiglu" else (("up", h, f),)
        return (*projections, ("output", q, h), *inner, ("down", f, h))

    def bias_of(self, matrix: str) -> bool:
        """Whether the linear layer of a matrix has a bias."""
        if matrix in ("gate", "up", "down"):
            return self.feed_forward_bias
        return self.output_bias if matrix == "output" else self.query_key_value_bias

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    def layer_parameters(self, degree: int = 1) -> int:
        """Parameters of a layer on one of ``degree`` tensor-parallel ranks.

        Norms and the biases of ``output`` and ``down`` are whole on every rank, everything else is shared out.
        """
        total = 2 * self.norm_parameters
        for name, inputs, outputs in self.matrices:
            total += inputs * outputs // degree
            if self.bias_of(name):
                total += outputs if name in ("output", "down") else outputs // degree
        return total

    @property
    def parameters(self) -> int:
        """Parameters of the whole network, one that is used twice counted once."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters() + tables + self.norm_parameters


_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff"),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
    "tied": ("tie_word_embeddings",),
    "attention_dropout": ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"),
    "dropout": ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob"),
    "embedding_dropout": ("embd_pdrop", "hidden_dropout_prob"),
    "positions": ("max_position_embeddings", "n_positions"),
}
"""What Hugging Face's configurations call the sizes (names of their classes' arguments in transformers 4 and 5)."""


_COUNTED = ("hidden", "layers", "heads", "vocabulary")
"""Sizes that every configuration states."""


def dims_of(configuration: Any) -> TransformerDims:
    """The sizes that a configuration states.

    Norms are root-mean-square norms where it has a ``rms_norm_eps``; the feed-forward part is gated where its
    activation is ``silu`` or it has such norms; what is gated has rotary positions and no biases unless it says so,
    anything else has biases, and learned positions unless it has a ``rope_theta``. Norms and ``gelu_new`` are taken to
    be composed as Hugging Face's modules compose them.

    Args:
        configuration: An object or a mapping with ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``vocab_size`` and so on, or with GPT-2's names, for example a Hugging Face configuration.

    Raises:
        ValueError: If a size is missing; the message names it.
    """

    def read(name: str) -> Any:
        if isinstance(configuration, Mapping):
            return configuration.get(name)
        return getattr(configuration, name, None)

    def find(key: str) -> Any:
        return next((value for name in _NAMES[key] if (value := read(name)) is not None), None)

    missing = [_NAMES[key][0] for key in _COUNTED if find(key) is None]
    if missing:
        raise ValueError(
            f"configuration {type(configuration).__name__} without {', '.join(missing)}: a closed form needs them; "
            "give TransformerDims yourself"
        )
    for key in (*_COUNTED, "ffn", "key_value_heads", "head_width"):
        value = find(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{_NAMES[key][0]} = {value!r}: a closed form needs one whole number of at least 1")
    activation = str(read("hidden_act") or read("activation_function") or "gelu")
    gated = activation in ("silu", "swiglu", "swish") or read("rms_norm_eps") is not None
    rotary = read("rope_theta") is not None or read("rope_parameters") is not None or gated
    plain = not gated and read("bias") is not False
    names = ("hidden", "layers", "heads", "vocabulary", "key_value_heads", "head_width")
    stated: dict[str, Any] = {name: find(name) for name in names}
    for name in ("dropout", "attention_dropout", "embedding_dropout"):
        stated[name] = float(find(name) or 0.0)
    return TransformerDims(
        **stated,
        ffn=find("ffn") or 4 * find("hidden"),
        positions=0 if rotary else find("positions") or 0,
        norm="rms" if read("rms_norm_eps") is not None else "layer",
        feed_forward="swiglu" if gated else "gelu",
        rotary=rotary,
        query_key_value_bias=bool(read("attention_bias")) or plain,
        output_bias=bool(read("attention_bias")) or plain,
        feed_forward_bias=bool(read("mlp_bias")) or plain,
        fused_query_key_value=read("n_embd") is not None,
        composed_norm=read("rms_norm_eps") is not None,
        composed_gelu=activation == "gelu_new",
        tied=bool(find("tied")),
    )
