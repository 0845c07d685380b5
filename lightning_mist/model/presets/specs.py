"""The specification of a preset: as a trace of it would say, in a moment and without torch."""

from collections.abc import Iterator, Sequence

import sympy

from lightning_mist.model.presets.parametric_specs import Forms, device_class, load_forms
from lightning_mist.model.presets.shapes import LanguageModelShape
from lightning_mist.model.spec import (
    MICROBATCH,
    SEQUENCE,
    ModelSpec,
    OptimizerSpec,
    ParameterSpec,
    SplitSpec,
    TensorSpec,
)
from lightning_mist.plan import LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.tensor_split import Factors, ParameterSplit, SequenceSplit, TensorSplit

KNOWN_OPTIMIZERS = {
    "AdamW": OptimizerSpec(
        name="AdamW",
        state_bytes_per_parameter_byte=2.0,
        step_peak_bytes_per_parameter_byte=1.0,
        step_peak_bytes_per_largest=0.0,
        step_moved_bytes_per_parameter_byte=20.0,
    )
}
"""What :func:`~lightning_mist.model.trace.optimizer.describe_optimizer` measures of optimizers with default options on
CUDA devices, where torch steps all parameters together."""


def preset_spec(
    shape: LanguageModelShape,
    *,
    name: str,
    precision: str,
    rows: int,
    length: int,
    degrees: Sequence[int],
    contexts: Sequence[int] = (),
    optimizer: OptimizerSpec,
    device_kind: str = "cuda",
    capability: tuple[int, int] | None = None,
) -> ModelSpec | None:
    """What a language model of some sizes costs.

    Args:
        precision: Lightning's name of the precision.
        length: Tokens per row.
        capability: CUDA's compute capability; an A100's where it is not known.

    Returns:
        None where such a model was never traced in this precision for such a device: then it has to be.
    """
    forms = load_forms(shape, precision, device_class(device_kind, capability))
    if forms is None:
        return None
    dtype = "float32" if precision == "32-true" or precision.endswith("-mixed") else forms.half
    itemsize = 4 if dtype == "float32" else 2
    numels = {name: int(sympy.prod(sizes)) for name, sizes, _ in parameters(shape, length)}
    known = [ParameterSpec(name=name, numel=n, bytes=n * itemsize, trainable=True) for name, n in numels.items()]
    whole = forms.parts(shape, length)
    return ModelSpec(
        name=name,
        module_map=preset_map(shape, rows=rows, length=length, degrees=degrees, contexts=contexts, dtype=dtype),
        head=whole.head,
        layers=(whole.layer,),
        kinds=(0,) * shape.layers,
        tail=whole.tail,
        boundaries=_boundaries(shape, dtype, itemsize, 1),
        parameters=tuple(known),
        buffer_bytes=0,
        # Ids of tokens and of those that follow, 8 bytes each.
        batch_bytes=16 * MICROBATCH * SEQUENCE,
        batch_rows=rows,
        sequence_length=length,
        optimizer=optimizer,
        precision=precision,
        device_kind=device_kind,
        head_width=shape.head_width,
        shared_saved_bytes=forms.shared(shape, length),
        splits=tuple(
            _split(forms, shape, length, degree, sequence, [item.bytes for item in known], dtype, itemsize)
            for degree in sorted({*degrees} - {1})
            if divides(shape, degree)
            for sequence in (False, True)
        ),
    )


def _split(
    forms: Forms,
    shape: LanguageModelShape,
    length: int,
    degree: int,
    sequence_parallel: bool,
    sizes: Sequence[int],
    dtype: str,
    itemsize: int,
) -> SplitSpec:
    parts = forms.parts(shape, length, degree=degree, sequence_parallel=sequence_parallel)
    shared = {item.name for item in split_of(shape, length, degree).parameters}
    names = [name for name, _, _ in parameters(shape, length)]
    return SplitSpec(
        degree=degree,
        sequence_parallel=sequence_parallel,
        head=parts.head,
        layers=(parts.layer,),
        tail=parts.tail,
        boundaries=_boundaries(shape, dtype, itemsize, degree if sequence_parallel else 1),
        parameter_bytes=tuple(
            size // degree if name in shared else size for name, size in zip(names, sizes, strict=True)
        ),
    )


def _boundaries(shape: LanguageModelShape, dtype: str, itemsize: int, parts: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The hidden states that cross each cut, or one rank's part of the sequence."""
    hidden = TensorSpec(
        shape=(MICROBATCH, SEQUENCE / parts, sympy.Integer(shape.hidden)),
        dtype=dtype,
        itemsize=itemsize,
        requires_grad=True,
        batch_dim=0,
    )
    return ((hidden,),) * (shape.layers - 1)


def preset_map(
    shape: LanguageModelShape,
    *,
    rows: int,
    length: int,
    degrees: Sequence[int],
    dtype: str,
    contexts: Sequence[int] = (),
) -> ModuleMap:
    """The map of a :class:`~lightning_mist.model.sources.reference_decoder.LanguageModel` of some sizes.

    What blocks return is left out: no plan is run from this map.

    Args:
        degrees: Tensor-parallel degrees; those that do not divide the heads are left out, with the reason.
        contexts: Context-parallel degrees; those that do not divide the length are left out, with the reason.
    """
    live = (rows, length, shape.hidden)
    sharing = [degree for degree in sorted({*contexts} - {1}) if length % degree == 0]
    fitting = [degree for degree in sorted({*degrees} - {1}) if divides(shape, degree)]
    cuts = [
        LiveTensor(
            key=("block", layer, 0),
            shape=live,
            dtype=dtype,
            requires_grad=True,
            batch_dim=0,
            sequence_dim=1 if fitting or sharing else None,
        )
        for layer in range(shape.layers - 1)
    ]
    return ModuleMap(
        step="training_step",
        blocks=tuple(f"blocks.{layer}" for layer in range(shape.layers)),
        outputs=(),
        cuts=tuple((cut,) for cut in cuts),
        parameters=tuple(
            ParameterUse(name=name, slots=(_slot(name, region),), shape=sizes, dtype=dtype, requires_grad=True)
            for name, sizes, region in parameters(shape, length)
        ),
        batch_rows=rows,
        splits=tuple(split_of(shape, length, degree) for degree in fitting),
        unsplit=tuple(
            (degree, f"{degree} does not divide {_counts(shape)}") for degree in sorted({*degrees} - {1, *fitting})
        ),
        contexts=tuple(TensorSplit(degree=degree, parameters=(), sequence=_entries(shape)) for degree in sharing),
        uncontexts=tuple(
            (degree, f"the sequence has {length} positions, which {degree} does not divide")
            for degree in sorted({*contexts} - {1, *sharing})
        ),
    )


def _slot(name: str, region: int) -> tuple[str, str, tuple[int, ...]]:
    owner, _, attribute = name.rpartition(".")
    return owner, attribute, (region,)


def _counts(shape: LanguageModelShape) -> str:
    groups = shape.key_value_heads
    said = f"{shape.heads} heads" if groups is None else f"{shape.heads} heads, {groups} heads of keys and values"
    return f"{said}, the inner width {shape.ffn} or the vocabulary of {shape.vocabulary}"


def divides(shape: LanguageModelShape, degree: int) -> bool:
    """Whether so many devices can have equal parts of everything that is shared out."""
    groups = shape.key_value_heads or shape.heads
    return not any(size % degree for size in (shape.heads, groups, shape.ffn, shape.vocabulary))


def parameters(shape: LanguageModelShape, length: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, sizes and region of every parameter, in the module's order; learned positions are ``length``, if any."""
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


_BY_COLUMNS = ("output", "down")  # matrices whose inputs are shared out; of the others it is the outputs


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
        sequence=_entries(shape),
    )


def _entries(shape: LanguageModelShape) -> tuple[SequenceSplit, ...]:
    """How blocks are entered in parts along the sequence."""
    return tuple(SequenceSplit(position=layer, leaf=0, dim=1) for layer in range(shape.layers))
