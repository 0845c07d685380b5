"""What a transformer layer keeps for its backward, tensor by tensor, without a trace.

Fujii, Watanabe and Yokota (arXiv:2411.06465) sum up, for Llama in 16 bits with fused norms and flash attention,

    s b h (12 + 4 k / a + 8 f / h)    bytes per layer

with ``h`` the hidden width, ``f`` the inner one, ``a`` query heads and ``k`` heads of keys and values. Here the same
sum is written as a list of tensors, so that it holds for other operators too and is exact to the byte: a form names the
operators that it assumes (:class:`OperatorSet`), and counts what their formula leaves out, the statistics of norms and
the log-sum-exp of attention.

A layer is ``x + D(A(N(x)))`` followed by ``x + D(F(N(x)))`` with norms ``N``, attention ``A``, dropout ``D`` and the
feed-forward part ``F``. Its output counts as its own, its input as that of the layer below.

Under tensor parallelism of degree ``t`` what lies inside of attention and feed-forward part is divided by ``t``. What
lies outside is whole on every rank, or with sequence parallelism (Korthikanti et al., 2022) divided too; then the
normed inputs of attention and feed-forward part are gathered, and either kept so (torch and this package) or gathered
again in backward (Megatron-LM, which is what the paper assumes).
"""

from dataclasses import dataclass
from typing import Literal

import sympy

from lightning_mist.estimate.closed_form.network_sizes import TransformerDims
from lightning_mist.model.spec import MICROBATCH, SEQUENCE

Share = Literal["none", "sequence", "tensor"]
"""How ranks share a tensor: every one has it whole, under sequence parallelism a part, always a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSet:
    """The operators that a form assumes.

    Attributes:
        rms_norm: ``"fused"`` keeps its input and one number per row; ``"decomposed"`` the input in 32 bits, what it is
            before it meets the weight, in 32 bits too, and one number per row.
        statistics: Type of a layer norm's mean and deviation: 32 bits, or the type of its input.
        device: Kind of device, whose rules say which attention runs (:func:`attention_kind`).
        dropout_mask: Type of masks: one byte per element, or the type of the input (the CPU multiplies by them).
        swiglu: ``"plain"`` keeps both inner activations, SiLU's result and the product; ``"fused"`` all but the second.
        gathers: Whether gathered inputs are kept until backward or gathered again (``"repeated"``).
    """

    name: str
    rms_norm: Literal["fused", "decomposed"] = "fused"
    statistics: Literal["single", "input"] = "single"
    device: Literal["cpu", "cuda"] = "cuda"
    dropout_mask: Literal["byte", "input"] = "byte"
    swiglu: Literal["plain", "fused"] = "plain"
    gathers: Literal["kept", "repeated"] = "kept"


CUDA = OperatorSet(name="CUDA")
"""What torch from 2.9 on runs on CUDA devices; older ones have no fused RMS norm."""

CPU = OperatorSet(name="CPU", rms_norm="decomposed", statistics="input", device="cpu", dropout_mask="input")
"""What torch runs on CPUs."""

_SEEDS = {"flash": 24, "efficient": 16}
"""What CUDA's fused attentions keep of their dropout, asked for or not: state and an empty place, seed and offset
(``_scaled_dot_product_flash_attention`` and ``_scaled_dot_product_efficient_attention`` in torch's
native_functions.yaml)."""

_EFFICIENT_ROWS = 32
"""Rows to a multiple of which efficient attention rounds its log-sum-exp (kAlignLSE in torch's
aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a layer is shared out.

    Attributes:
        degree: Tensor-parallel ranks (``t``).
        sequence_parallel: Whether they share what lies outside of attention and feed-forward part.
        context: Ranks that share the sequence (``c``): every length is ``s / c``.
    """

    degree: int = 1
    sequence_parallel: bool = False
    context: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One tensor that a layer keeps.

    Attributes:
        width: Elements per token.
        per_position: Whether there is one such row for every token of the sequence: attention's probabilities.
        multiple: Lengths are rounded up to a multiple of this.
        per_row: Whether every row of the batch has one; tables of positions are made once.
    """

    name: str
    width: int
    itemsize: int
    share: Share
    per_position: bool = False
    multiple: int = 1
    per_row: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """What a layer keeps.

    Attributes:
        extra_bytes: What does not grow with batch or sequence.
    """

    kept: tuple[Kept, ...]
    split: Split
    extra_bytes: int = 0

    def of(self, tensor: Kept) -> sympy.Expr:
        """Bytes of one tensor on one rank, in microbatch rows and sequence length."""
        length = SEQUENCE / self.split.context
        rows = length if tensor.multiple == 1 else tensor.multiple * sympy.ceiling(length / tensor.multiple)
        tokens = (MICROBATCH if tensor.per_row else 1) * rows * (length if tensor.per_position else 1)
        shared = tensor.share == "tensor" or (tensor.share == "sequence" and self.split.sequence_parallel)
        return sympy.Rational(tensor.width * tensor.itemsize, self.split.degree if shared else 1) * tokens

    @property
    def bytes(self) -> sympy.Expr:
        """Bytes on one rank, in microbatch rows and sequence length."""
        return sympy.Add(*(self.of(tensor) for tensor in self.kept), self.extra_bytes)

    def at(self, rows: int, length: int) -> int:
        """Bytes on one rank.

        Raises:
            ValueError: If ranks cannot share them equally.
        """
        found = sympy.sympify(self.bytes).subs({MICROBATCH: rows, SEQUENCE: length})
        if found != int(found):
            raise ValueError(
                f"{rows} rows of {length} tokens over tensor-parallel degree {self.split.degree} and context-parallel "
                f"degree {self.split.context}: {found} bytes; the degrees must divide widths and length"
            )
        return int(found)


def layer_form(
    dims: TransformerDims,
    operators: OperatorSet = CUDA,
    *,
    itemsize: int = 2,
    mixed: bool = False,
    split: Split = Split(),
    recomputed: bool = False,
) -> LayerForm:
    """What one layer keeps from its forward to its backward.

    Where norms keep a copy of their input instead of it, nobody keeps what the last layer hands on: recomputed, it
    keeps nothing. Attention composed of single operators is counted for two heads on each rank at least.

    Args:
        itemsize: Bytes of an element of activations and parameters.
        mixed: Whether parameters have 32 bits, and matrices are multiplied under autocast in ``itemsize`` bytes. Then
            the residual stream has 32 bits too, every linear layer keeps its own cast of its input, and of its matrix
            (Lightning's mixed precision keeps no casts from one operator to the next).
        recomputed: Whether it is recomputed in backward: then it keeps what it hands on.
    """
    stream = 4 if mixed else itemsize
    if recomputed:
        return LayerForm(kept=(Kept(name="output", width=dims.hidden, itemsize=stream, share="sequence"),), split=split)
    attention, extra = _attention(dims, operators, itemsize)
    inputs = [sum(width == dims.hidden for _, width, _ in part) for part in _parts(dims)] if mixed else [1, 1]
    kept = (
        *norm_kept("attention norm", dims, operators, stream),
        *_normed("attention input", dims, operators, itemsize, split, inputs[0]),
        *attention,
        *_dropout("attention dropout mask", dims, operators, _summed(dims, "output", itemsize, stream, split)),
        *_stream("residual stream behind attention", dims, operators, stream),
        *norm_kept("feed-forward norm", dims, operators, stream),
        *_normed("feed-forward input", dims, operators, itemsize, split, inputs[1]),
        *_feed_forward(dims, operators, itemsize),
        *_dropout("feed-forward dropout mask", dims, operators, _summed(dims, "down", itemsize, stream, split)),
        *_stream("output", dims, operators, stream),
    )
    if mixed:
        extra += itemsize * sum(inner * outer for _, inner, outer in dims.matrices) // split.degree
    return LayerForm(kept=kept, split=split, extra_bytes=extra)


def _summed(dims: TransformerDims, matrix: str, itemsize: int, stream: int, split: Split) -> int:
    """Bytes of an element of what comes out of attention or feed-forward part.

    Tensor-parallel ranks add the bias to the sum over ranks, by an operator that autocast leaves in 32 bits.
    """
    return stream if split.degree > 1 and dims.bias_of(matrix) else itemsize


def _parts(dims: TransformerDims) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """The matrices that read what the first norm makes, and those that read what the second one does."""
    at = next(index for index, (name, _, _) in enumerate(dims.matrices) if name == "output")
    return dims.matrices[:at], dims.matrices[at + 1 : -1]


def _upcasts(dims: TransformerDims, operators: OperatorSet, itemsize: int) -> bool:
    """Whether norms keep a copy of their input in 32 bits instead of it."""
    return dims.norm == "rms" and not _is_fused(dims, operators) and itemsize < 4


def _is_fused(dims: TransformerDims, operators: OperatorSet) -> bool:
    """Whether a root-mean-square norm is one operator."""
    return operators.rms_norm == "fused" and not dims.composed_norm


def _stream(name: str, dims: TransformerDims, operators: OperatorSet, itemsize: int) -> tuple[Kept, ...]:
    """The residual stream, which the norm behind it keeps."""
    if _upcasts(dims, operators, itemsize):
        return ()
    return (Kept(name=name, width=dims.hidden, itemsize=itemsize, share="sequence"),)


def norm_kept(name: str, dims: TransformerDims, operators: OperatorSet, itemsize: int) -> tuple[Kept, ...]:
    """What a norm keeps but its input."""
    wide = max(4, itemsize)
    if dims.norm == "layer":
        single = wide if operators.statistics == "single" else itemsize
        return (Kept(name=f"{name}: mean and deviation", width=2, itemsize=single, share="sequence"),)
    found = [Kept(name=f"{name}: deviation", width=1, itemsize=wide, share="sequence")]
    if not _is_fused(dims, operators):
        if _upcasts(dims, operators, itemsize):
            found.append(Kept(name=f"{name}: input in 32 bits", width=dims.hidden, itemsize=wide, share="sequence"))
        size = itemsize if dims.composed_norm else wide
        found.append(Kept(name=f"{name}: before its weight", width=dims.hidden, itemsize=size, share="sequence"))
    return tuple(found)


def _normed(
    name: str, dims: TransformerDims, operators: OperatorSet, itemsize: int, split: Split, copies: int
) -> tuple[Kept, ...]:
    """What the linear layers behind a norm keep, which sequence-parallel ranks gather: one tensor, or one for each."""
    repeats = split.sequence_parallel and operators.gathers == "repeated"
    share: Share = "sequence" if repeats else "none"
    return (Kept(name=name, width=copies * dims.hidden, itemsize=itemsize, share=share),)


def _dropout(name: str, dims: TransformerDims, operators: OperatorSet, itemsize: int) -> tuple[Kept, ...]:
    if dims.dropout == 0.0:
        return ()
    return (Kept(name=name, width=dims.hidden, itemsize=_mask(operators, itemsize), share="sequence"),)


def _mask(operators: OperatorSet, itemsize: int) -> int:
    return 1 if operators.dropout_mask == "byte" else itemsize


def attention_kind(
    dims: TransformerDims, operators: OperatorSet, itemsize: int
) -> Literal["flash", "efficient", "math"]:
    """The attention that torch runs.

    A CPU has flash attention without dropout. CUDA devices (from compute capability 8.0 on, with causal masks alone)
    have it in 16 bits; in 32 bits the memory-efficient one, for as many heads of keys and values as of queries. Where
    neither runs, attention is composed of single operators.
    """
    if operators.device == "cpu":
        return "math" if dims.attention_dropout > 0.0 else "flash"
    if itemsize == 2:
        return "flash"
    same_heads = dims.groups == dims.heads or dims.repeats_key_value
    return "efficient" if itemsize == 4 and same_heads else "math"


def _attention(dims: TransformerDims, operators: OperatorSet, itemsize: int) -> tuple[tuple[Kept, ...], int]:
    """What attention keeps but its input, and what of it does not grow."""
    queries, kind = dims.query_width, attention_kind(dims, operators, itemsize)
    groups = queries if dims.repeats_key_value or kind == "math" else dims.key_value_width

    def kept(name: str, width: int, size: int = itemsize, multiple: int = 1, *, per_position: bool = False) -> Kept:
        return Kept(name=name, width=width, itemsize=size, share="tensor", per_position=per_position, multiple=multiple)

    output = kept("attention output", queries)
    tables = _tables(dims, itemsize)
    if kind != "math":
        value = kept("values", groups)
        if dims.rotary and dims.fused_query_key_value and not dims.repeats_key_value:
            # Values that were neither rotated nor repeated are a view of what queries and keys were rotated from.
            value = kept("values before rotation", queries + 2 * groups)
        multiple = _EFFICIENT_ROWS if kind == "efficient" else 1
        logarithms = kept("attention: log-sum-exp", dims.heads, max(4, itemsize), multiple)
        seeds = _SEEDS[kind] if operators.device == "cuda" else 0
        # Flash attention lays out its output as its queries: concatenated ones head by head, not token by token.
        is_copied = kind == "flash" and bool(tables)
        copies = (kept("attention output by tokens", queries),) if is_copied else ()
        return (*tables, kept("queries", queries), kept("keys", groups), value, output, logarithms, *copies), seeds
    # Composed of single operators, halves are computed in 32 bits.
    wide = max(4, itemsize)
    heads = [kept("queries", queries, wide), kept("keys", groups, wide), kept("values", groups, wide)]
    scores = [kept("attention: probabilities", dims.heads, wide, per_position=True)]
    if dims.attention_dropout > 0.0:
        mask = _mask(operators, wide)
        scores.append(kept("attention: dropout mask", dims.heads, mask, per_position=True))
        scores.append(kept("attention: probabilities behind dropout", dims.heads, wide, per_position=True))
    return (*tables, *heads, output, *scores), 0


def _tables(dims: TransformerDims, itemsize: int) -> tuple[Kept, ...]:
    """Cosines and sines of half of what is rotated, for queries and for keys, where every layer makes its own."""
    if not dims.rotary or dims.rotation == "sum":
        return ()
    width = 2 * (dims.rotated_width or dims.query_width // dims.heads)
    return (Kept(name="tables of rotation", width=width, itemsize=itemsize, share="none", per_row=False),)


def _feed_forward(dims: TransformerDims, operators: OperatorSet, itemsize: int) -> tuple[Kept, ...]:
    """What the feed-forward part keeps but its input."""
    if dims.feed_forward == "gelu":
        names: tuple[str, ...] = ("up", "GELU")
        if dims.composed_gelu:
            names = ("up", "half of it", "hyperbolic tangent", "one more", "GELU")
    elif operators.swiglu == "fused":
        names = ("gate", "up", "product")
    else:
        names = ("gate", "SiLU", "up", "product")
    return tuple(Kept(name=name, width=dims.ffn, itemsize=itemsize, share="tensor") for name in names)
