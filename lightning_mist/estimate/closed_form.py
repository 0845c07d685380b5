"""Transformers by formulas of their sizes: where no trace can be made, and as a second opinion.

Fujii, Watanabe and Yokota (arXiv:2411.06465) sum up what a layer of Llama keeps for its backward, in 16 bits with fused
norms and flash attention, on each of ``t`` tensor-parallel ranks with sequence parallelism,

    s b h (12 + 4 k / a + 8 f / h) / t    bytes

with ``h`` the hidden width, ``f`` the inner one, ``a`` query heads, ``k`` heads of keys and values. Here the same sum
is written tensor by tensor, so that it holds for other widths of elements, norms composed in Python, attention composed
of single operators, autocast, and experts: a token passes through those that it is sent to and through shared ones,
while all of them have parameters, gradients and optimizer state.

A layer is ``x + D(A(N(x)))`` followed by ``x + D(F(N(x)))`` with norms ``N``, attention ``A``, dropout ``D`` and the
feed-forward part ``F``. Its output counts as its own, its input as that of the layer below. Peaks are sums by hand: a
backward begins with the gradient of the layer's output where its output was, and needs at most one inner activation and
the gradient of the last matrix, or two inner activations at a gated product, beyond what is kept; a recomputed layer
first makes again what it keeps. Head and tail are one table of tokens, a norm and the chain from scores to loss, by
measured bytes per score. Of seconds it says nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import sympy

from lightning_mist.errors import PlanError
from lightning_mist.estimate.transformer_sizes import TransformerDims, ends_part, module_dims
from lightning_mist.model.spec import (
    MICROBATCH,
    SEQUENCE,
    LayerSpec,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    SplitSpec,
    TensorSpec,
    bytes_at,
)
from lightning_mist.plan import LiveTensor, ModuleMap, ParameterUse

if TYPE_CHECKING:
    from torch import nn

TOKENS = MICROBATCH * SEQUENCE

ALIKE = 0.02
"""Share by which two counts of bytes may differ and still be said to be the same: what formulas leave out of a layer
(statistics of norms, seeds, tables of rotation) is less."""


_ITEMSIZES = {"16": 2, "bf16": 2, "32": 4, "64": 8}
_DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}


class Split(NamedTuple):
    """How many tensor-parallel ranks share a layer, and whether what lies between its parts too."""

    degree: int = 1
    sequence_parallel: bool = False


WHOLE = Split()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What a closed form is about: sizes, precision, and the kind of device whose operators run.

    Raises:
        ValueError: If the precision is not known.
    """

    dims: TransformerDims
    precision: str = "bf16-true"
    device_kind: str = "cuda"

    def __post_init__(self) -> None:
        """Check the precision."""
        kind, _, how = self.precision.partition("-")
        if kind not in _ITEMSIZES or how not in ("true", "mixed") or (how == "mixed" and _ITEMSIZES[kind] != 2):
            raise ValueError(
                f"precision = {self.precision!r}: closed forms know 16-true, bf16-true, 32-true, 64-true, 16-mixed and "
                "bf16-mixed"
            )

    @property
    def mixed(self) -> bool:
        """Whether parameters have 32 bits and matrices are multiplied under autocast."""
        return self.precision.endswith("-mixed")

    @property
    def itemsize(self) -> int:
        """Bytes of an element that is computed with."""
        return _ITEMSIZES[self.precision.partition("-")[0]]

    @property
    def stored(self) -> int:
        """Bytes of an element of parameters and of the residual stream."""
        return 4 if self.mixed else self.itemsize

    @property
    def score_bytes(self) -> tuple[int, int, int]:
        """Bytes per score (token times vocabulary) that are kept, of the forward and of the backward of the loss.

        Cross entropy, traced in eager torch 2.13: of scores cast to 32 bits, or under autocast, which on CUDA devices
        casts their logarithms and keeps both.
        """
        if self.mixed:
            return (6, 8, 10) if self.device_kind == "cuda" else (4, 10, 12)
        return (8, 16, 24) if self.itemsize == 8 else (4, 8, 12)

    def word_ranks(self, split: Split) -> int:
        """Tensor-parallel ranks that share the words of tables and scores: all of them, if they divide their number."""
        return split.degree if self.dims.vocabulary % split.degree == 0 else 1

    def layer_bytes(self, split: Split = WHOLE, *, sparse: bool = False, recomputed: bool = False) -> sympy.Expr:
        """What one layer keeps from its forward to its backward on one rank; recomputed it keeps what it hands on."""
        dims, size, stored = self.dims, self.itemsize, self.stored
        outside = sympy.Rational(1, split.degree if split.sequence_parallel else 1)
        if recomputed:
            return outside * dims.hidden * stored * TOKENS
        matrices = dims.matrices(sparse=sparse)
        # Under autocast every linear layer keeps its own cast of what it reads, and of its matrix.
        readers = sum(item.inputs == dims.hidden for item in matrices if not item.name.startswith("experts."))
        between = self._norm_bytes() * 2 + self._mask_bytes() * 2
        inputs = dims.hidden * size * (readers if self.mixed else 2)
        inside = self._attention_bytes() + self._feed_forward_bytes(sparse)
        per_token = outside * between + inputs + inside / sympy.Integer(split.degree)
        casts = size * sum(item.numel for item in matrices if item.copies == 1) // split.degree if self.mixed else 0
        return per_token * TOKENS + casts

    def _norm_bytes(self) -> int:
        """Bytes per token of a norm and of the residual stream that it reads."""
        dims, stored = self.dims, self.stored
        if dims.norm == "layer" or (not dims.composed_norm and self.device_kind == "cuda"):
            return dims.hidden * stored
        # Composed of single operators, with a copy in 32 bits in place of an input of fewer.
        return dims.hidden * (max(4, stored) + (stored if dims.composed_norm else max(4, stored)))

    def _mask_bytes(self) -> int:
        return self.dims.hidden * (1 if self.device_kind == "cuda" else self.itemsize) if self.dims.dropout else 0

    def _attention_bytes(self) -> sympy.Expr:
        """Bytes per token of attention but for its input: queries, keys, values, and what comes out.

        A CPU has flash attention without dropout. CUDA devices (from compute capability 8.0 on, with causal masks) have
        it in 16 bits; in 32 bits the memory-efficient one, for as many heads of keys and values as of queries. Where
        neither runs, attention is composed of single operators in 32 bits, and keeps its probabilities.
        """
        dims, size = self.dims, self.itemsize
        queries, keys = dims.query_width, dims.query_width if dims.repeats_key_value else dims.key_value_width
        values = out = queries
        narrow, wide = 0, max(4, size)
        if dims.latent is not None:
            item = dims.latent
            values = out = dims.heads * item.value
            narrow = size * (item.rotated + dims.heads * (item.plain + item.value))
            narrow += (2 * size + (wide if dims.composed_norm else 0)) * (item.queries + item.keys)
        elif not dims.repeats_key_value:
            values = queries + 2 * keys if dims.rotates_view else keys
        if dims.query_norms != "none":
            narrow += (size + (wide if dims.composed_norm else size)) * (queries + keys)
        if self.device_kind != "cuda":
            is_fused = not dims.attention_dropout
        else:
            is_fused = size == 2 or (size == 4 and (dims.groups == dims.heads or dims.repeats_key_value))
        if is_fused:
            # Of 32 bits memory-efficient attention keeps the layout of tokens.
            narrow += size * out if dims.concatenates and (size == 2 or self.device_kind != "cuda") else 0
            return sympy.Integer(size * (queries + keys + values + out) + narrow + wide * dims.heads)
        scores = wide * dims.heads * SEQUENCE
        if dims.attention_dropout:
            scores = scores * 2 + (1 if self.device_kind == "cuda" else wide) * dims.heads * SEQUENCE
        return scores + wide * 3 * queries + size * out + narrow

    def _feed_forward_bytes(self, sparse: bool) -> int:
        """Bytes per token of the feed-forward part but for its input."""
        dims, size, experts = self.dims, self.itemsize, self.dims.experts
        inner = 4 if dims.feed_forward == "swiglu" else 5 if dims.composed_gelu else 2
        if not sparse or experts is None:
            return size * inner * dims.ffn
        # A token is copied to its experts; what they return is weighted. Autocast leaves them alone.
        own = self.stored
        weighted = max(4, own) if experts.is_wide else own
        sent = experts.chosen * (own * (inner * experts.width + dims.hidden) + 2 * weighted * dims.hidden)
        shared = size * (inner * experts.shared + (dims.hidden if experts.gates_shared else 0))
        routed = 8 * experts.count + (4 * dims.hidden if experts.is_wide and own < 4 else 0)
        return sent + shared + routed


def closed_spec(
    dims: TransformerDims,
    *,
    optimizer: OptimizerSpec,
    precision: str,
    rows: int,
    sequence_length: int,
    degrees: Sequence[int],
    device_kind: str,
    name: str,
) -> ModelSpec:
    """The specification of a transformer of which only sizes are known.

    Args:
        degrees: Tensor-parallel degrees that plans may use, each also with sequence parallelism.
        device_kind: ``"cuda"`` or ``"cpu"``: whose operators compute.

    Raises:
        PlanError: If a degree does not divide heads and widths.
    """
    form = ClosedForm(dims=dims, precision=precision, device_kind=device_kind)
    inner = dims.ffn if dims.experts is None else dims.experts.width
    for degree in degrees:
        if dims.heads % degree or dims.groups % degree or inner % degree:
            raise PlanError(
                f"tensor_parallel_degree = {degree}: it must divide {dims.heads} heads, {dims.groups} heads of keys "
                f"and values and the inner width {inner}"
            )
    kinds = sorted({dims.is_sparse(index) for index in range(dims.layers)})
    found = list(_parameters(form))
    shape = (rows, sequence_length, dims.hidden)
    cut = LiveTensor(
        key="hidden", shape=shape, dtype=_DTYPES[form.stored], requires_grad=True, batch_dim=0, sequence_dim=1
    )
    return ModelSpec(
        name=name,
        module_map=ModuleMap(
            step="training_step",
            blocks=tuple(f"layers.{index}" for index in range(dims.layers)),
            cuts=((cut,),) * (dims.layers - 1),
            parameters=tuple(use for use, _, _ in found),
            batch_rows=rows,
        ),
        head=_head(form, WHOLE),
        layers=tuple(_layer(form, WHOLE, sparse) for sparse in kinds),
        kinds=tuple(kinds.index(dims.is_sparse(index)) for index in range(dims.layers)),
        tail=_tail(form, WHOLE),
        boundaries=((_hidden(form, WHOLE),),) * (dims.layers - 1),
        parameters=tuple(item for _, item, _ in found),
        buffer_bytes=0,
        # Ids of tokens and of those that follow, 8 bytes each.
        batch_bytes=16 * TOKENS,
        batch_rows=rows,
        sequence_length=sequence_length,
        optimizer=optimizer,
        precision=precision,
        head_width=dims.query_width // dims.heads,
        splits=tuple(
            SplitSpec(
                degree=degree,
                sequence_parallel=sequence,
                head=_head(form, split),
                layers=tuple(_layer(form, split, sparse) for sparse in kinds),
                tail=_tail(form, split),
                boundaries=((_hidden(form, split),),) * (dims.layers - 1),
                parameter_bytes=tuple(item.bytes // ranks(split) for _, item, ranks in found),
            )
            for degree in sorted(set(degrees) - {1})
            for sequence in (False, True)
            for split in [Split(degree, sequence)]
        ),
        notes=(
            f"nothing was traced: a closed form of {dims.layers} layers with hidden width {dims.hidden}, of "
            f"{dims.parameters:,} parameters; what operators it does not know keep is missing",
        ),
    ).evenly()


_Ranks: TypeAlias = Callable[[Split], int]
_Parameter: TypeAlias = tuple[ParameterUse, ParameterSpec, _Ranks]
"""A parameter, its bytes, and how many tensor-parallel ranks share it."""

_Slot: TypeAlias = tuple[str, str, tuple[int, ...]]


def _parameters(form: ClosedForm) -> Iterator[_Parameter]:
    """Every parameter, where it is used, and how many tensor-parallel ranks share it."""
    dims, last, dtype = form.dims, form.dims.layers - 1, _DTYPES[form.stored]

    def made(name: str, shape: tuple[int, ...], region: int, ranks: _Ranks, *others: _Slot) -> _Parameter:
        owner, _, kind = name.rpartition(".")
        slots = ((owner, kind, (region,)), *others)
        numel = int(sympy.prod(shape))
        use = ParameterUse(name=name, slots=slots, shape=shape, dtype=dtype, requires_grad=True)
        return use, ParameterSpec(name=name, numel=numel, bytes=numel * form.stored, trainable=True), ranks

    def whole(split: Split) -> int:
        return 1

    def shared(split: Split) -> int:
        return split.degree

    table = (dims.vocabulary, dims.hidden)
    tied: list[_Slot] = [("head", "weight", (last,))] if dims.tied else []
    yield made("tokens.weight", table, -1, form.word_ranks, *tied)
    if dims.positions:
        yield made("positions.weight", (dims.positions, dims.hidden), -1, whole)
    for index in range(dims.layers):
        for name, width in dims.vectors():
            yield made(f"layers.{index}.{name}", (width,), index, whole)
        for item in dims.matrices(sparse=dims.is_sparse(index)):
            own, ranks = f"layers.{index}.{item.name}", whole if item.is_whole else shared
            copies = () if item.copies == 1 else (item.copies,)
            yield made(f"{own}.weight", (*copies, item.outputs, item.inputs), index, ranks)
            if item.has_bias:
                yield made(f"{own}.bias", (*copies, item.outputs), index, whole if ends_part(item.name) else ranks)
    for kind in ("weight", "bias") if dims.norm == "layer" else ("weight",):
        yield made(f"norm.{kind}", (dims.hidden,), last, whole)
    if not dims.tied:
        yield made("head.weight", table, last, form.word_ranks)
    if dims.head_bias:
        yield made("head.bias", (dims.vocabulary,), last, form.word_ranks)


def _hidden(form: ClosedForm, split: Split) -> TensorSpec:
    """The hidden states that stages hand on."""
    length = SEQUENCE / split.degree if split.sequence_parallel else SEQUENCE
    return TensorSpec(
        shape=(MICROBATCH, length, sympy.Integer(form.dims.hidden)),
        dtype=_DTYPES[form.stored],
        itemsize=form.stored,
        requires_grad=True,
    )


def _layer(form: ClosedForm, split: Split, sparse: bool) -> LayerSpec:
    dims, t, stored = form.dims, split.degree, form.stored
    saved = form.layer_bytes(split, sparse=sparse)
    kept = form.layer_bytes(split, sparse=sparse, recomputed=True)
    hidden = dims.hidden * stored * TOKENS
    matrices = dims.matrices(sparse=sparse)
    down = next(item for item in matrices if item.name in ("down", "experts.down"))
    chosen = 1 if dims.experts is None or not sparse else dims.experts.chosen
    inner = sympy.Rational(down.inputs * chosen * form.itemsize, t) * TOKENS
    largest = sympy.Rational(stored * max(item.numel for item in matrices), t)
    gradients = sympy.Integer(stored * dims.layer_parameters(t, sparse=sparse))
    # The gradient of the last matrix is cast from the type that it was computed in.
    at_down = inner + sympy.Rational((stored + (form.itemsize if form.mixed else 0)) * down.numel, t)
    lines, first = [at_down], [at_down]
    if dims.feed_forward == "swiglu":
        # In the backward that makes them, gradients of matrices stay.
        lines, first = [at_down, 2 * inner], [at_down, inner + at_down]
    # At the end all gradients have been made and everything kept is gone but what came in.
    at_end = gradients + 2 * hidden - saved
    return LayerSpec(
        kind="SparseLayer" if sparse else "Layer",
        example=f"layers.{[dims.is_sparse(index) for index in range(dims.layers)].index(sparse)}",
        forward_work=(),
        backward_work=(),
        saved_bytes=saved,
        checkpointed_saved_bytes=kept,
        forward_peak_bytes=saved + hidden,
        backward_peak_bytes=_maximum(*lines, largest + 2 * hidden - saved),
        first_backward_peak_bytes=_maximum(*first, at_end),
        recompute_backward_peak_bytes=_maximum(saved + hidden, *(saved - kept + line for line in lines)),
        first_recompute_backward_peak_bytes=_maximum(
            saved + hidden, *(saved - kept + line for line in first), gradients + 2 * hidden - kept
        ),
    )


def _head(form: ClosedForm, split: Split) -> LayerSpec:
    dims = form.dims
    hidden = sympy.Rational(dims.hidden * form.stored, split.degree if split.sequence_parallel else 1) * TOKENS
    tables = _table(form, split) + dims.positions * dims.hidden * form.stored
    # Its gradient arrives where its output was; the sum with positions needs a copy in either direction.
    made = 2 * hidden if dims.positions else hidden
    return _edge("head", hidden, made, _table(form, split), tables)


def _tail(form: ClosedForm, split: Split) -> LayerSpec:
    dims, (kept, ahead, back) = form.dims, form.score_bytes
    hidden, table = dims.hidden * form.stored * TOKENS, _table(form, split)
    scores = sympy.Rational(dims.vocabulary, form.word_ranks(split)) * TOKENS
    before = dims.hidden * form.itemsize * TOKENS + (table * form.itemsize / form.stored if form.mixed else 0)
    saved = before + kept * scores
    # At the matrix: the gradient of the scores, that of the table, and one hidden state.
    at_matrix = form.itemsize * scores + table + hidden - kept * scores
    backward = _maximum((back - kept) * scores, at_matrix)
    first = _maximum((back - kept) * scores, at_matrix, table + 2 * hidden - saved)
    return _edge("tail", saved, before + ahead * scores, backward, first)


def _table(form: ClosedForm, split: Split) -> sympy.Expr:
    """Bytes of the table of tokens on one rank."""
    return sympy.Rational(form.dims.vocabulary * form.dims.hidden * form.stored, form.word_ranks(split))


def _edge(kind: str, saved: sympy.Expr, forward: sympy.Expr, backward: sympy.Expr, first: sympy.Expr) -> LayerSpec:
    """Head or tail, which are never recomputed."""
    return LayerSpec(
        kind=kind,
        example="",
        forward_work=(),
        backward_work=(),
        saved_bytes=saved,
        checkpointed_saved_bytes=saved,
        forward_peak_bytes=forward,
        backward_peak_bytes=backward,
        first_backward_peak_bytes=first,
        recompute_backward_peak_bytes=backward,
        first_recompute_backward_peak_bytes=first,
    )


def _maximum(*lines: sympy.Expr) -> sympy.Expr:
    return sympy.Max(*lines, evaluate=False) if len(lines) > 1 else lines[0]


def second_opinion(spec: ModelSpec, dims: TransformerDims, device_kind: str) -> str:
    """What a traced layer, the last, keeps beside the closed form, in hidden states of ``s b h`` elements."""
    form = ClosedForm(dims=dims, precision=spec.precision, device_kind=device_kind)
    at = spec.batch_rows, spec.sequence_length or 1
    unit = at[0] * at[1] * dims.hidden * form.itemsize
    traced = bytes_at(spec.layers[spec.kinds[-1]].saved_bytes, *at) / unit
    closed = bytes_at(form.layer_bytes(sparse=dims.is_sparse(dims.layers - 1)), *at) / unit
    if abs(traced / closed - 1) <= ALIKE:
        return f"each layer keeps {traced:.1f} hidden states, as a closed form of its sizes says"
    return (
        f"each layer keeps {traced:.1f} hidden states; a closed form of its sizes says {closed:.1f}, the trace "
        f"{abs(traced / closed - 1):.0%} {'more' if traced > closed else 'less'}: the module computes by other "
        "operators than it assumes"
    )


def with_second_opinion(spec: ModelSpec, module: "nn.Module", device_kind: str) -> ModelSpec:
    """A traced specification with a note on what the closed form says, if the module states its sizes."""
    dims = None if spec.sequence_length is None else module_dims(module, spec.sequence_length)
    if dims is None or dims.layers != spec.num_layers:
        return spec
    return replace(spec, notes=(*spec.notes, f"second opinion: {second_opinion(spec, dims, device_kind)}"))
