"""A network's specification from its sizes alone: the closed form as a fallback where a module cannot be traced.

What layers keep is :mod:`lightning_mist.estimate.closed_form.layer_bytes`'s and exact for the operators that it names.
Peaks are sums by hand: with ``w`` the parameters of the matrix at hand, ``f`` one inner activation and ``h`` one hidden
state, a backward begins with the gradient of the layer's output where its output was, and needs at most

    f + w    at its last matrix: the gradient of what goes into it, and of the matrix
    2 f      at a gated product: gradients of both factors and of the product, which is gone

beyond what is kept; a recomputed layer first makes again what it keeps. Head and tail are one table of tokens, a norm
and the chain from scores to loss, by measured bytes per score (:data:`LOSSES`). Seconds from such a specification are
rough: see :mod:`lightning_mist.estimate.closed_form.layer_work`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import sympy

from lightning_mist.errors import PlanError
from lightning_mist.estimate.closed_form.layer_bytes import LayerForm, Split, norm_kept
from lightning_mist.estimate.closed_form.layer_work import TOKENS, PartWork, head_work, layer_work, tail_work
from lightning_mist.estimate.closed_form.transformer_form import DTYPES, ClosedForm
from lightning_mist.model.spec import (
    MICROBATCH,
    SEQUENCE,
    LayerSpec,
    ModelSpec,
    ParameterSpec,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.plan import LiveTensor, ModuleMap, ParameterUse

Slot: TypeAlias = tuple[str, str, tuple[int, ...]]
"""A module, the name of a parameter in it, and the regions that use it there."""


def closed_form_spec(form: ClosedForm, degrees: Sequence[int] = (), *, name: str = "transformer") -> ModelSpec:
    """The specification of a network that nobody traced.

    Args:
        degrees: Tensor-parallel degrees that plans may use, each also with sequence parallelism.

    Raises:
        PlanError: If a degree does not divide heads and widths.
    """
    dims = form.dims
    for degree in degrees:
        if dims.heads % degree or dims.groups % degree or dims.ffn % degree:
            raise PlanError(
                f"tensor_parallel_degree = {degree}: it must divide {dims.heads} heads, {dims.groups} heads of keys "
                f"and values and the inner width {dims.ffn}"
            )
    whole = Split()
    uses, parameters = _parameters(form)
    return ModelSpec(
        name=name,
        module_map=ModuleMap(
            step="training_step",
            blocks=tuple(f"layers.{index}" for index in range(dims.layers)),
            outputs=(),
            cuts=tuple((_live(form),) for _ in range(dims.layers - 1)),
            parameters=uses,
            batch_rows=form.batch_rows,
        ),
        head=_head(form, whole),
        layers=(_layer(form, whole),),
        kinds=(0,) * dims.layers,
        tail=_tail(form, whole),
        boundaries=((_hidden(form, whole),),) * (dims.layers - 1),
        parameters=parameters,
        buffer_bytes=0,
        # Ids of tokens and of those that follow, 8 bytes each.
        batch_bytes=16 * TOKENS,
        batch_rows=form.batch_rows,
        sequence_length=form.sequence_length,
        optimizer=form.optimizer,
        precision=form.precision,
        head_width=dims.query_width // dims.heads,
        shared_saved_bytes=_shared(form),
        splits=tuple(
            _split(form, parameters, Split(degree=degree, sequence_parallel=sequence))
            for degree in sorted(set(degrees) - {1})
            for sequence in (False, True)
        ),
        notes=(
            f"nothing was traced: a closed form of {dims.layers} layers with hidden width {dims.hidden} and the "
            f"operators of {form.operators.name}; bytes kept by layers are exact for these, peaks and seconds are not",
        ),
    )


def _split(form: ClosedForm, parameters: Sequence[ParameterSpec], split: Split) -> SplitSpec:
    return SplitSpec(
        degree=split.degree,
        sequence_parallel=split.sequence_parallel,
        head=_head(form, split),
        layers=(_layer(form, split),),
        tail=_tail(form, split),
        boundaries=((_hidden(form, split),),) * (form.dims.layers - 1),
        parameter_bytes=tuple(item.bytes // _ranks(form, item.name, split) for item in parameters),
    )


def _ranks(form: ClosedForm, name: str, split: Split) -> int:
    """Tensor-parallel ranks that share a parameter."""
    owner, _, kind = name.rpartition(".")
    part = owner.rpartition(".")[2]
    if part in ("tokens", "head"):
        return form.word_ranks(split)
    is_whole = "norm" in part or part == "positions" or (kind == "bias" and part in ("output", "down"))
    return 1 if is_whole else split.degree


def _parameters(form: ClosedForm) -> tuple[tuple[ParameterUse, ...], tuple[ParameterSpec, ...]]:
    dims, last = form.dims, form.dims.layers - 1
    uses: list[ParameterUse] = []

    def add(owner: str, kind: str, shape: tuple[int, ...], region: int, *others: Slot) -> None:
        slots = ((owner, kind, (region,)), *others)
        dtype = DTYPES[form.stored]
        uses.append(ParameterUse(name=f"{owner}.{kind}", slots=slots, shape=shape, dtype=dtype, requires_grad=True))

    def norm(owner: str, region: int) -> None:
        for kind in ("weight", "bias") if dims.norm == "layer" else ("weight",):
            add(owner, kind, (dims.hidden,), region)

    table = (dims.vocabulary, dims.hidden)
    add("tokens", "weight", table, -1, *([("head", "weight", (last,))] if dims.tied else []))
    if dims.positions:
        add("positions", "weight", (dims.positions, dims.hidden), -1)
    for index in range(dims.layers):
        norm(f"layers.{index}.attention_norm", index)
        for name, inner, outer in dims.matrices:
            add(f"layers.{index}.{name}", "weight", (outer, inner), index)
            if dims.bias_of(name):
                add(f"layers.{index}.{name}", "bias", (outer,), index)
        norm(f"layers.{index}.feed_forward_norm", index)
    norm("norm", last)
    if not dims.tied:
        add("head", "weight", table, last)
    specs = []
    for use in uses:
        numel = use.shape[0] * (use.shape[1] if len(use.shape) == 2 else 1)
        specs.append(ParameterSpec(name=use.name, numel=numel, bytes=numel * form.stored, trainable=True))
    return tuple(uses), tuple(specs)


def _hidden(form: ClosedForm, split: Split) -> TensorSpec:
    """The hidden states that stages hand on."""
    length = SEQUENCE / split.degree if split.sequence_parallel else SEQUENCE
    return TensorSpec(
        shape=(MICROBATCH, length, sympy.Integer(form.dims.hidden)),
        dtype=DTYPES[form.stored],
        itemsize=form.stored,
        requires_grad=True,
        batch_dim=0,
    )


def _live(form: ClosedForm) -> LiveTensor:
    shape = (form.batch_rows, form.sequence_length, form.dims.hidden)
    return LiveTensor(
        key="hidden", shape=shape, dtype=DTYPES[form.stored], requires_grad=True, batch_dim=0, sequence_dim=1
    )


def _layer(form: ClosedForm, split: Split) -> LayerSpec:
    dims, t = form.dims, split.degree
    saved, kept = form.form(split).bytes, form.form(split, recomputed=True).bytes
    hidden = dims.hidden * form.stored * TOKENS
    inner = sympy.Rational(dims.ffn * form.itemsize, t) * TOKENS
    largest = sympy.Rational(form.stored * max(a * b for _, a, b in dims.matrices), t)
    gradients = sympy.Integer(form.stored * dims.layer_parameters(t))
    # The gradient of the last matrix is cast from the type that it was computed in.
    cast = sympy.Rational(form.itemsize * dims.ffn * dims.hidden, t) if form.mixed else sympy.S.Zero
    at_down = inner + sympy.Rational(form.stored * dims.ffn * dims.hidden, t) + cast
    # In the backward that makes them, gradients of matrices stay.
    lines, first = [at_down], [at_down]
    if dims.feed_forward == "swiglu":
        lines, first = [at_down, 2 * inner], [at_down, inner + at_down]
    # At the end all gradients have been made and everything kept is gone but what came in.
    at_end = gradients + 2 * hidden - saved
    matrices = sum(a * b for _, a, b in dims.matrices)
    work = layer_work(form, split)
    widths = sum(outer for _, _, outer in dims.matrices) + dims.query_width + dims.ffn
    return LayerSpec(
        kind="Layer",
        example="layers.0",
        forward_work=work.forward,
        backward_work=work.backward,
        saved_bytes=saved,
        checkpointed_saved_bytes=kept,
        forward_peak_bytes=saved + hidden,
        backward_peak_bytes=_maximum(*lines, largest + 2 * hidden - saved),
        first_backward_peak_bytes=_maximum(*first, at_end),
        recompute_backward_peak_bytes=_maximum(saved + hidden, *(saved - kept + line for line in lines)),
        first_recompute_backward_peak_bytes=_maximum(
            saved + hidden, *(saved - kept + line for line in first), gradients + 2 * hidden - kept
        ),
        weight_flops=sympy.Rational(2 * matrices, t) * TOKENS,
        weight_bytes=sympy.Rational(widths * form.itemsize, t) * TOKENS + 2 * dims.hidden * form.itemsize * TOKENS,
    )


def _head(form: ClosedForm, split: Split) -> LayerSpec:
    dims = form.dims
    shared = split.degree if split.sequence_parallel else 1
    hidden = sympy.Rational(dims.hidden * form.stored, shared) * TOKENS
    masks = dims.hidden * (1 if form.operators.dropout_mask == "byte" else form.stored) if dims.embedding_dropout else 0
    saved = hidden + masks * TOKENS + _shared(form)
    tables = _table(form, split) + dims.positions * dims.hidden * form.stored
    # Its gradient arrives where its output was; the sum with positions needs a copy in either direction.
    made = saved + hidden if dims.positions or dims.embedding_dropout else saved
    work = head_work(form, split, _table(form, split))
    return _edge("head", work, saved, made, _table(form, split), tables + hidden - saved)


def _tail(form: ClosedForm, split: Split) -> LayerSpec:
    dims, losses = form.dims, form.losses
    hidden = dims.hidden * form.stored * TOKENS
    divided = form.word_ranks(split)
    scores = sympy.Rational(dims.vocabulary, divided) * TOKENS
    table = _table(form, split)
    normed = dims.hidden * form.itemsize * TOKENS
    norm = LayerForm(kept=norm_kept("norm", dims, form.operators, form.stored), split=split).bytes
    before = norm + normed + (table * form.itemsize / form.stored if form.mixed else 0)
    saved = before + losses.kept * scores
    gradient = form.itemsize * scores
    # At the matrix: the gradient of the scores, that of the table, and one hidden state.
    at_matrix = gradient + table + hidden - losses.kept * scores
    backward = _maximum((losses.backward - losses.kept) * scores, at_matrix)
    first = _maximum((losses.backward - losses.kept) * scores, at_matrix, table + 2 * hidden - saved)
    flops = sympy.Rational(2 * dims.vocabulary * dims.hidden, divided) * TOKENS
    work = tail_work(form, split, table, min(losses.kept, max(4, form.itemsize)))
    return replace(
        _edge("tail", work, saved, before + losses.forward * scores, backward, first),
        weight_flops=flops,
        weight_bytes=normed + gradient,
    )


def _shared(form: ClosedForm) -> sympy.Expr:
    """What depends on the length alone: numbers of positions, or tables of the angles' cosines and sines."""
    dims = form.dims
    has_tables = dims.rotary and dims.rotation == "sum"
    width = 2 * form.stored * (dims.query_width // dims.heads) if has_tables else 0
    return (width + (8 if dims.positions else 0)) * SEQUENCE


def _table(form: ClosedForm, split: Split) -> sympy.Expr:
    """Bytes of the table of tokens on one rank."""
    return sympy.Rational(form.dims.vocabulary * form.dims.hidden * form.stored, form.word_ranks(split))


def _edge(
    kind: str, work: PartWork, saved: sympy.Expr, forward: sympy.Expr, backward: sympy.Expr, first: sympy.Expr
) -> LayerSpec:
    """Head or tail, which are never recomputed."""
    return LayerSpec(
        kind=kind,
        example="",
        forward_work=work.forward,
        backward_work=work.backward,
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
