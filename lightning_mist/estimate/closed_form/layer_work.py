"""The work of a transformer's parts by kind of operator, from its sizes alone.

Matrix products and attention are counted exactly. Of the other operators every tensor that must be read or written is
counted once where torch runs them one by one: two norms, two sums with the residual stream, the activation, rotation of
queries and keys, casts under autocast, the chain from scores to the loss, and additions to gradients.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from lightning_mist.estimate.closed_form.layer_bytes import Split, attention_kind
from lightning_mist.estimate.closed_form.transformer_form import ClosedForm
from lightning_mist.model.spec import MICROBATCH, SEQUENCE, OperatorCost, OperatorKind

TOKENS = MICROBATCH * SEQUENCE

_ROTATION_PASSES, _ROTATION_CALLS = 10, 5
"""Tensors read and written, and operators, by ``x * cos + rotate_half(x) * sin``: two products of which each reads a
table that is small, a negation and a concatenation of halves, and a sum."""

_GATED = {"plain": (5, 8, 2, 3), "fused": (3, 5, 1, 1)}
"""Inner activations read and written by SiLU and product, forward and backward, and operators."""

_GELU = (2, 3, 1, 1)
"""The same of GELU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """The work of a part in both directions."""

    forward: tuple[OperatorCost, ...]
    backward: tuple[OperatorCost, ...]


def layer_work(form: ClosedForm, split: Split) -> PartWork:
    """The work of a layer on one rank."""
    forward, backward = [*_matrices(form, split, 1)], [*_matrices(form, split, 2)]
    attention = _attention(form, split)
    return PartWork(
        forward=(*forward, *attention.forward, *_passes(form, split).forward),
        backward=(*backward, *attention.backward, *_passes(form, split).backward),
    )


def head_work(form: ClosedForm, split: Split, table: sympy.Expr) -> PartWork:
    """The work of the look-up in a table of so many bytes, and of positions added to it."""
    hidden = _shared(split) * form.dims.hidden * form.stored * TOKENS
    forward = [_cost("index", moved=8 * TOKENS + 2 * hidden, calls=1)]
    backward = [_cost("index", moved=8 * TOKENS + hidden + table, calls=1)]
    adds, tables = 0, 3 * table
    if form.dims.positions:
        forward.append(_cost("elementwise", moved=3 * hidden, calls=1))
        adds, tables = 1, tables + 3 * form.dims.positions * form.dims.hidden * form.stored
    return PartWork(
        forward=tuple(forward),
        backward=(*backward, _cost("elementwise", moved=tables + 2 * adds * hidden, calls=1 + 2 * adds)),
    )


def tail_work(form: ClosedForm, split: Split, table: sympy.Expr, wide: int) -> PartWork:
    """The work of the last norm, the scores, and the loss, whose chain has ``wide`` bytes per score."""
    dims = form.dims
    divided = form.word_ranks(split)
    scores = sympy.Rational(dims.vocabulary, divided) * TOKENS
    hidden = dims.hidden * TOKENS
    flops = 2 * dims.hidden * scores
    moved = form.itemsize * (sympy.Rational(dims.vocabulary * dims.hidden, divided) + hidden + scores)
    casts = () if wide == form.itemsize else (_cost("copy", moved=(form.itemsize + wide) * scores, calls=1),)
    return PartWork(
        forward=(
            _cost("matmul", flops=flops, moved=moved, calls=1),
            _cost("reduction", moved=2 * form.stored * hidden + 3 * wide * scores, calls=3),
            *casts,
        ),
        backward=(
            _cost("matmul", flops=2 * flops, moved=2 * moved, calls=2),
            _cost("reduction", moved=3 * form.stored * hidden + 3 * wide * scores, calls=3),
            *casts,
            _cost("elementwise", moved=3 * table, calls=2),
        ),
    )


def _cost(kind: OperatorKind, *, calls: int, moved: sympy.Expr | int, flops: sympy.Expr = sympy.S.Zero) -> OperatorCost:
    return OperatorCost(kind=kind, flops=flops, moved_bytes=sympy.sympify(moved), calls=calls)


def _shared(split: Split) -> sympy.Rational:
    """Part of the residual stream that a rank computes with."""
    return sympy.Rational(1, split.degree if split.sequence_parallel else 1)


def _matrices(form: ClosedForm, split: Split, times: int) -> Iterator[OperatorCost]:
    """Products with matrices; in backward two for each, of the same size."""
    sizes: Counter[tuple[int, int, bool]] = Counter()
    for name, inputs, outputs in form.dims.matrices:
        sizes[inputs, outputs, name in ("output", "down")] += times
    for (inputs, outputs, is_last), calls in sizes.items():
        weights = sympy.Rational(inputs * outputs, split.degree)
        # Of matrices that end attention or feed-forward part the inputs are shared out, of others the outputs.
        shared, whole = (inputs, outputs) if is_last else (outputs, inputs)
        vectors = (whole + sympy.Rational(shared, split.degree)) * TOKENS
        yield _cost(
            "matmul",
            flops=2 * calls * weights * TOKENS,
            moved=calls * form.itemsize * (weights + vectors),
            calls=calls,
        )


def _attention(form: ClosedForm, split: Split) -> PartWork:
    """Attention from queries, keys and values to its output; backward makes scores again, unless they were kept."""
    dims, size, t = form.dims, form.itemsize, split.degree
    queries, keys = (sympy.Rational(width, t) * TOKENS for width in (dims.query_width, dims.key_value_width))
    product = 2 * queries * SEQUENCE
    if attention_kind(dims, form.operators, size) != "math":
        return PartWork(
            forward=(_cost("causal_attention", flops=2 * product, moved=2 * size * (queries + keys), calls=1),),
            backward=(_cost("causal_attention", flops=5 * product, moved=4 * size * (queries + keys), calls=1),),
        )
    wide = max(4, size)
    scores = sympy.Rational(dims.heads * wide, t) * TOKENS * SEQUENCE
    moved = wide * (queries + keys) + scores
    return PartWork(
        forward=(
            _cost("matmul", flops=2 * product, moved=2 * moved, calls=2),
            _cost("reduction", moved=2 * scores, calls=1),
            _cost("elementwise", moved=4 * scores, calls=2),
        ),
        backward=(
            _cost("matmul", flops=4 * product, moved=4 * moved, calls=4),
            _cost("reduction", moved=3 * scores, calls=1),
            _cost("elementwise", moved=4 * scores, calls=2),
        ),
    )


def _passes(form: ClosedForm, split: Split) -> PartWork:
    """Everything that is limited by memory."""
    dims, t = form.dims, split.degree
    hidden = _shared(split) * dims.hidden * form.stored * TOKENS
    inner = sympy.Rational(dims.ffn * form.itemsize, t) * TOKENS
    ahead, back, ahead_calls, back_calls = _GATED[form.operators.swiglu] if dims.feed_forward == "swiglu" else _GELU
    rotated = sympy.Rational((dims.query_width + dims.key_value_width) * form.itemsize, t) * TOKENS
    rotation = _ROTATION_PASSES * rotated if dims.rotary else 0
    turns = 2 * _ROTATION_CALLS if dims.rotary else 0
    parameters = len(dims.matrices) + 2
    forward = [
        _cost("reduction", moved=4 * hidden, calls=2),
        _cost("elementwise", moved=6 * hidden + ahead * inner + rotation, calls=2 + ahead_calls + turns),
    ]
    gradients = 3 * form.stored * dims.layer_parameters(t)
    backward = [
        _cost("reduction", moved=6 * hidden, calls=2),
        _cost(
            "elementwise",
            moved=6 * hidden + back * inner + rotation + gradients,
            calls=2 + back_calls + turns + parameters,
        ),
    ]
    if form.mixed:
        matrices = sympy.Rational(sum(inputs * outputs for _, inputs, outputs in dims.matrices), t)
        inputs = sum(inputs for _, inputs, _ in dims.matrices if inputs == dims.hidden) * TOKENS
        cast = _cost("copy", moved=(form.stored + form.itemsize) * (matrices + inputs), calls=2 * len(dims.matrices))
        forward.append(cast)
        backward.append(cast)
    return PartWork(forward=tuple(forward), backward=tuple(backward))
