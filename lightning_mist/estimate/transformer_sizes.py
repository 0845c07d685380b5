"""Sizes of a transformer, as its configuration states them: all that a closed form knows of a network.

What a configuration does not say of its family is in :data:`FAMILIES`; a file of another family is refused by name, as
its parameters would be counted wrong.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning_mist.model.presets import SIZE_NAMES, LanguageModelShape

if TYPE_CHECKING:
    from torch import nn


class Matrix(NamedTuple):
    """A matrix of a layer, or as many of a kind as there are experts."""

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False
    copies: int = 1
    is_whole: bool = False  # on every tensor-parallel rank

    @property
    def numel(self) -> int:
        """Elements of all copies, without biases."""
        return self.copies * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward part.

    Attributes:
        count: Experts of a layer.
        chosen: Experts that each token is sent to.
        width: Inner width of one.
        shared: Inner width of all together that every token passes through; 0 without.
        gates_shared: Whether a number for each token says how much these count.
        is_wide: Whether routers and what weighs results compute in 32 bits whatever the others do.
        dense: Layers that have a plain feed-forward part instead.
    """

    count: int
    chosen: int
    width: int
    shared: int = 0
    gates_shared: bool = False
    is_wide: bool = False
    dense: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"{self.chosen} experts for each token: it is sent to 1 to {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Widths of attention whose keys and values are made from something narrower (DeepSeek-AI, 2024).

    Attributes:
        queries: Of what queries are made from; 0 where they are made from the hidden state.
        keys: Of what keys and values are made from.
        rotated, plain: Of the parts of each head's queries and keys.
        value: Of each head's values.
    """

    queries: int
    keys: int
    rotated: int
    plain: int
    value: int


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
        feed_forward: ``"swiglu"`` (three matrices, whatever gates; Shazeer, 2020) or ``"gelu"`` (two).
        query_key_value_bias, output_bias, feed_forward_bias, head_bias: Which linear layers have biases.
        query_norms: Whether queries and keys are normed: each head, or all together.
        rotates_view: Whether one linear layer makes queries, keys and values, and the first two are rotated: values
            that are not copied stay a view of all three.
        concatenates: Whether rotation concatenates parts: flash attention then lays out its result head by head, which
            is copied token by token.
        repeats_key_value: Whether heads of keys and values are copied to as many as of queries ahead of attention.
        composed_norm: Whether root-mean-square norms are composed in Python, as Hugging Face's are: they keep their
            input in 32 bits and, in its own type, what meets their weight.
        composed_gelu: Whether GELU is, as Hugging Face's ``gelu_new``: it keeps three steps between input and result.
        dropout: Probability behind attention and feed-forward part.
        attention_dropout: Probability inside attention.
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
    query_key_value_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    head_bias: bool = False
    query_norms: Literal["none", "head", "all"] = "none"
    rotates_view: bool = False
    concatenates: bool = False
    repeats_key_value: bool = False
    composed_norm: bool = False
    composed_gelu: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        """Check sizes."""
        for name in ("hidden", "ffn", "layers", "heads", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a transformer needs at least 1")
        if self.head_width is None and self.latent is None and self.hidden % self.heads:
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
        if self.latent is not None:
            return self.heads * (self.latent.rotated + self.latent.plain)
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def key_value_width(self) -> int:
        """Width of all keys (or values) together."""
        return self.query_width // self.heads * self.groups

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense

    def matrices(self, *, sparse: bool = False) -> tuple[Matrix, ...]:
        """Every matrix of a layer, with experts or with a plain feed-forward part."""
        h, bias = self.hidden, self.query_key_value_bias
        if self.latent is None:
            q, k = self.query_width, self.key_value_width
            attention = [Matrix("query", h, q, bias), Matrix("key", h, k, bias), Matrix("value", h, k, bias)]
            attention.append(Matrix("output", q, h, self.output_bias))
        else:
            item, heads = self.latent, self.heads
            attention = [Matrix("query", item.queries or h, self.query_width)]
            if item.queries:
                attention.insert(0, Matrix("query_down", h, item.queries, bias, is_whole=True))
            attention.append(Matrix("key_value_down", h, item.keys + item.rotated, bias, is_whole=True))
            attention.append(Matrix("key_value", item.keys, heads * (item.plain + item.value)))
            attention.append(Matrix("output", heads * item.value, h, self.output_bias))
        if not sparse or self.experts is None:
            return (*attention, *self._inner("", self.ffn, 1))
        experts = self.experts
        found = [Matrix("router", h, experts.count, is_whole=True)]
        found += self._inner("experts.", experts.width, experts.count)
        if experts.shared:
            found += self._inner("shared.", experts.shared, 1)
        if experts.gates_shared:
            found.append(Matrix("shared_gate", h, 1, is_whole=True))
        return (*attention, *found)

    def _inner(self, owner: str, width: int, copies: int) -> Iterator[Matrix]:
        make, bias = partial(Matrix, copies=copies), self.feed_forward_bias
        if self.feed_forward == "swiglu":
            yield make(f"{owner}gate", self.hidden, width, bias)
        yield make(f"{owner}up", self.hidden, width, bias)
        yield make(f"{owner}down", width, self.hidden, bias)

    def vectors(self) -> tuple[tuple[str, int], ...]:
        """Parameters of a layer that are neither matrices nor biases of these, all whole on every rank."""
        kinds = ("weight", "bias") if self.norm == "layer" else ("weight",)
        found = [(f"{norm}.{kind}", self.hidden) for norm in ("attention_norm", "feed_forward_norm") for kind in kinds]
        if self.query_norms == "all":
            found += [("query_norm.weight", self.query_width), ("key_norm.weight", self.key_value_width)]
        elif self.query_norms == "head":
            width = self.query_width // self.heads
            found += [("query_norm.weight", width), ("key_norm.weight", width)]
        if self.latent is not None:
            widths = {"query_norm": self.latent.queries, "key_value_norm": self.latent.keys}
            found += [(f"{name}.weight", width) for name, width in widths.items() if width]
        return tuple(found)

    def layer_parameters(self, degree: int = 1, *, sparse: bool = False) -> int:
        """Parameters of a layer on one of ``degree`` tensor-parallel ranks."""
        total = sum(numel for _, numel in self.vectors())
        for item in self.matrices(sparse=sparse):
            ranks = 1 if item.is_whole else degree
            total += item.numel // ranks
            if item.has_bias:
                total += item.copies * item.outputs // (1 if ends_part(item.name) else ranks)
        return total

    @property
    def parameters(self) -> int:
        """Parameters of the whole network, one that is used twice counted once."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        tables += self.vocabulary if self.head_bias else 0
        layers = sum(self.layer_parameters(sparse=self.is_sparse(index)) for index in range(self.layers))
        return layers + tables + self.hidden * (2 if self.norm == "layer" else 1)


def ends_part(name: str) -> bool:
    """Whether a matrix ends attention or feed-forward part: its inputs are shared out, its bias is whole."""
    return name.rpartition(".")[2] in ("output", "down")


_PLAIN_BIAS = {"query_key_value_bias": True, "output_bias": True, "feed_forward_bias": True}
_GPT = {"norm": "layer", "feed_forward": "gelu", **_PLAIN_BIAS}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {**_GPT, "tied": True},
    "gpt_neox": {**_GPT, "rotates_view": True},
    "llama": {},
    "mistral": {},
    "phi3": {"rotates_view": True},
    "gemma": {"tied": True},
    "qwen2": {"query_key_value_bias": True},
    "qwen3": {"query_norms": "head"},
    "mixtral": {},
    "olmoe": {"query_norms": "all"},
    "phimoe": {"norm": "layer"},
    "qwen2_moe": {"query_key_value_bias": True},
    "qwen3_moe": {"query_norms": "head"},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {"output_bias": False},
}
"""What configurations do not say of their family, by ``model_type``, as Hugging Face's modules are made (transformers
4.56 to 5.23). Parameters of published files are compared in ``tests/estimate/test_closed_form.py``."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    **SIZE_NAMES,
    "tied": ("tie_word_embeddings",),
    "attention_dropout": ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob"),
    "dropout": ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob"),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok",),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
}
"""What Hugging Face's configurations call sizes and choices."""

_COUNTED = ("hidden", "layers", "heads", "vocabulary")
"""Sizes that every configuration states."""

_UNCOUNTED = ("expert", "moe", "lora_rank", "latent", "ssm", "conv", "sparse")
"""Parts of names of settings that say of a configuration without a family that sizes alone do not do."""


_Reader = Callable[[str], Any]


def dims_of(configuration: Any) -> TransformerDims:
    """The sizes that a configuration states.

    One without a ``model_type`` is Llama's where it has a ``rms_norm_eps`` or is gated, else GPT's: with biases, and
    learned positions unless it has a ``rope_theta``.

    Args:
        configuration: An object or a mapping with ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``vocab_size`` and so on, or with GPT-2's names, for example a Hugging Face configuration.

    Raises:
        ValueError: If a size is missing, or its family is not known; the message names it.
    """
    stated = configuration if isinstance(configuration, Mapping) else getattr(configuration, "__dict__", {})

    def read(name: str) -> Any:
        return stated.get(name) if name in stated else getattr(configuration, name, None)

    def find(key: str) -> Any:
        return next((value for name in _NAMES[key] if (value := read(name)) is not None), None)

    family, known = read("model_type") or None, FAMILIES.get(str(read("model_type")))
    if family is not None and known is None:
        raise ValueError(
            f"model_type {family!r}: a closed form counts the parameters of {', '.join(FAMILIES)}; trace it instead"
        )
    uncounted = [name for name in stated if stated[name] and any(word in name for word in _UNCOUNTED)]
    if known is None and uncounted:
        raise ValueError(
            f"configuration without model_type, with {', '.join(uncounted)}: only of known families "
            f"({', '.join(FAMILIES)}) is it known what that means; give model_type, or trace it instead"
        )
    missing = [_NAMES[key][0] for key in _COUNTED if find(key) is None]
    if missing:
        raise ValueError(
            f"configuration {type(configuration).__name__} without {', '.join(missing)}: a closed form needs them; "
            "give TransformerDims yourself"
        )
    for key in (*_COUNTED, "ffn", "key_value_heads", "head_width", "experts", "chosen", "expert_width"):
        value = find(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{_NAMES[key][0]} = {value!r}: a closed form needs one whole number of at least 1")
    activation = str(read("hidden_act") or read("activation_function") or "gelu")
    has_rms = read("rms_norm_eps") is not None
    gated = known.get("feed_forward") != "gelu" if known is not None else has_rms or activation in ("silu", "swish")
    plain = known is None and not gated and read("bias") is not False
    rotary = gated or read("rope_theta") is not None or read("rope_parameters") is not None or family == "gpt_neox"
    attends = bool(read("attention_bias"))
    choices: dict[str, Any] = {
        "norm": "rms" if has_rms or (known is not None and gated) else "layer",
        "feed_forward": "swiglu" if gated else "gelu",
        "query_key_value_bias": attends or plain,
        "output_bias": attends or plain,
        "feed_forward_bias": bool(read("mlp_bias")) or plain,
        "head_bias": bool(read("lm_head_bias")),
        "query_norms": "head" if read("use_qk_norm") else "none",
    }
    names = ("hidden", "layers", "heads", "vocabulary", "key_value_heads", "head_width")
    sizes: dict[str, Any] = {name: find(name) for name in names} | {"ffn": find("ffn") or 4 * find("hidden")}
    chances: dict[str, Any] = {name: float(find(name) or 0.0) for name in ("dropout", "attention_dropout")}
    choices |= {"tied": False, **(known or {})}
    if find("tied") is not None:
        choices["tied"] = bool(find("tied"))
    return TransformerDims(
        **sizes,
        **chances,
        **choices,
        positions=0 if rotary else find("positions") or 0,
        composed_norm=choices["norm"] == "rms",
        composed_gelu=activation == "gelu_new",
        experts=_experts_of(read, find),
        latent=_latent_of(read),
    )


def _experts_of(read: _Reader, find: _Reader) -> Experts | None:
    """The experts that a configuration of a known family states."""
    if find("experts") is None:
        return None
    every, width = read("decoder_sparse_step") or 1, find("expert_width")
    apart = {*(read("mlp_only_layers") or ()), *range(read("first_k_dense_replace") or 0)}
    gated = read("shared_expert_intermediate_size")
    return Experts(
        count=find("experts"),
        chosen=find("chosen") or 1,
        width=width,
        shared=gated or (read("n_shared_experts") or 0) * width,
        gates_shared=bool(gated),
        is_wide=read("kv_lora_rank") is not None,
        dense=frozenset(index for index in range(find("layers")) if index in apart or (index + 1) % every),
    )


def _latent_of(read: _Reader) -> Latent | None:
    if read("kv_lora_rank") is None:
        return None
    return Latent(
        queries=read("q_lora_rank") or 0,
        keys=read("kv_lora_rank"),
        rotated=read("qk_rope_head_dim"),
        plain=read("qk_nope_head_dim"),
        value=read("v_head_dim"),
    )


def shape_dims(shape: LanguageModelShape, sequence_length: int) -> TransformerDims:
    """The sizes of a model that is known by name.

    Raises:
        ValueError: If its attention and feed-forward part share a norm, which no closed form is about.
    """
    if shape.parallel:
        raise ValueError("attention and feed-forward part share a norm: no closed form is about that; trace it instead")
    return TransformerDims(
        hidden=shape.hidden,
        ffn=shape.ffn,
        layers=shape.layers,
        heads=shape.heads,
        vocabulary=shape.vocabulary,
        key_value_heads=shape.key_value_heads,
        positions=0 if shape.rotary_fraction else sequence_length,
        norm="rms" if shape.norm == "rmsnorm" else "layer",
        feed_forward=shape.feed_forward,
        rotates_view=shape.rotary_fraction > 0 and shape.key_value_heads is None,
        concatenates=shape.rotary_fraction > 0,
        repeats_key_value=(shape.key_value_heads or shape.heads) < shape.heads,
        tied=shape.tied,
    )


def module_dims(module: "nn.Module", sequence_length: int) -> TransformerDims | None:
    """The sizes of a transformer, from the configuration that it or a part of it carries; None if there is none."""
    from lightning_mist.model.sources import LanguageModel

    for part in module.modules():
        try:
            if isinstance(part, LanguageModel):
                return shape_dims(part.shape, sequence_length)
            if getattr(part, "config", None) is not None:
                return dims_of(part.config)
        except ValueError:
            continue
    return None
