"""Where a preset can be cut and how it can be shared out, by its sizes alone: what tracing it would find."""

from collections.abc import Iterator, Sequence

from lightning_mist.model.presets.shapes import LanguageModelShape
from lightning_mist.plan import LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.tensor_split import Factors, ParameterSplit, SequenceSplit, TensorSplit


def preset_map(shape: LanguageModelShape, *, rows: int, length: int, degrees: Sequence[int], dtype: str) -> ModuleMap:
    """The map of a :class:`~lightning_mist.model.sources.reference_decoder.LanguageModel` of some sizes.

    What blocks return is left out: no plan is run from this map.

    Args:
        shape: The sizes.
        rows: Rows of each rank's batch.
        length: Tokens per row.
        degrees: Tensor-parallel degrees; those that do not divide the heads are left out, with the reason.
        dtype: Name of the parameters' element type.
    """
    live = (rows, length, shape.hidden)
    fitting = [degree for degree in sorted({*degrees} - {1}) if divides(shape, degree)]
    cuts = [
        LiveTensor(
            key=("block", layer, 0),
            shape=live,
            dtype=dtype,
            requires_grad=True,
            batch_dim=0,
            sequence_dim=1 if fitting else None,
        )
        for layer in range(shape.layers - 1)
    ]
    return ModuleMap(
        step="training_step",
        blocks=tuple(f"blocks.{layer}" for layer in range(shape.layers)),
        outputs=(),
        cuts=tuple((cut,) for cut in cuts),
        parameters=tuple(
            ParameterUse(name=name, slots=((*_slot(name), (region,)),), shape=sizes, dtype=dtype, requires_grad=True)
            for name, sizes, region in parameters(shape, length)
        ),
        batch_rows=rows,
        splits=tuple(split_of(shape, length, degree) for degree in fitting),
        unsplit=tuple(
            (degree, f"{degree} does not divide {_counts(shape)}") for degree in sorted({*degrees} - {1, *fitting})
        ),
    )


def _slot(name: str) -> tuple[str, str]:
    """The module of a parameter, and its name there."""
    owner, _, attribute = name.rpartition(".")
    return owner, attribute


def _counts(shape: LanguageModelShape) -> str:
    groups = shape.key_value_heads
    said = f"{shape.heads} heads" if groups is None else f"{shape.heads} heads, {groups} heads of keys and values"
    return f"{said}, the inner width {shape.ffn} or the vocabulary of {shape.vocabulary}"


def divides(shape: LanguageModelShape, degree: int) -> bool:
    """Whether so many devices can have equal parts of everything that is shared out."""
    groups = shape.key_value_heads or shape.heads
    return not any(size % degree for size in (shape.heads, groups, shape.ffn, shape.vocabulary))


def parameters(shape: LanguageModelShape, length: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, sizes and region of every parameter, in the module's order.

    Args:
        shape: The sizes.
        length: Tokens per row: so many learned positions there are, if any.
    """
    h, last = shape.hidden, shape.layers - 1
    norm = ("weight", "bias") if shape.norm == "layernorm" else ("weight",)
    table = (shape.vocabulary, h)
    yield "tokens.weight", table, -1
    if not shape.rotary_fraction:
        yield "positions.weight", (length, h), -1
    for layer in range(shape.layers):
        name = f"blocks.{layer}"
        yield from ((f"{name}.attention_norm.{kind}", (h,), layer) for kind in norm)
        if shape.key_value_heads is None:
            yield f"{name}.attention.query_key_value.weight", (3 * h, h), layer
        else:
            yield f"{name}.attention.query.weight", (h, h), layer
            yield f"{name}.attention.key.weight", (shape.key_value_width, h), layer
            yield f"{name}.attention.value.weight", (shape.key_value_width, h), layer
        yield f"{name}.attention.output.weight", (h, h), layer
        if not shape.parallel:
            yield from ((f"{name}.feed_forward_norm.{kind}", (h,), layer) for kind in norm)
        for part in ("gate", "up") if shape.feed_forward == "swiglu" else ("up",):
            yield f"{name}.feed_forward.{part}.weight", (shape.ffn, h), layer
        yield f"{name}.feed_forward.down.weight", (h, shape.ffn), layer
    yield from ((f"norm.{kind}", (h,), last) for kind in norm)
    yield "head.weight", table, last


_BY_COLUMNS = ("output", "down")
"""Matrices whose inputs are shared out; of the others it is the outputs."""


def split_of(shape: LanguageModelShape, length: int, degree: int) -> TensorSplit:
    """How so many devices share the parameters: matrices alternately by their outputs and inputs, tables by tokens."""
    found = []
    for name, sizes, _ in parameters(shape, length):
        part = name.split(".")[-2]
        if "norm" in part or part == "positions":
            continue
        dim = int(part in _BY_COLUMNS)
        factors: Factors = ((sizes[dim], True),)
        if part == "query_key_value":
            factors = ((3, False), (shape.hidden, True))
        found.append(ParameterSplit(name=name, dim=dim, factors=factors))
    return TensorSplit(
        degree=degree,
        parameters=tuple(found),
        sequence=tuple(SequenceSplit(position=layer, leaf=0, dim=1) for layer in range(shape.layers)),
    )
