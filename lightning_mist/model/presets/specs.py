"""The specification of a preset: as a trace of it would say, in a moment and without torch."""

from collections.abc import Sequence

import sympy

from lightning_mist.model.presets.parametric_specs import Forms, device_class, load_forms
from lightning_mist.model.presets.preset_map import divides, parameters, preset_map, split_of
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

KNOWN_OPTIMIZERS = {
    "AdamW": OptimizerSpec(
        name="AdamW",
        state_bytes_per_parameter_byte=2.0,
        step_peak_bytes_per_parameter_byte=1.0,
        step_peak_bytes_per_largest=0.0,
        step_moved_bytes_per_parameter_byte=20.0,
    ),
}
"""What :func:`~lightning_mist.model.trace.optimizer.describe_optimizer` measures of optimizers with default options on
CUDA
devices, where torch steps all parameters together."""


def preset_spec(
    shape: LanguageModelShape,
    *,
    name: str,
    precision: str,
    rows: int,
    length: int,
    degrees: Sequence[int],
    optimizer: OptimizerSpec,
    device_kind: str = "cuda",
    capability: tuple[int, int] | None = None,
) -> ModelSpec | None:
    """What a language model of some sizes costs.

    Args:
        shape: Its sizes.
        name: For people.
        precision: Lightning's name of the precision.
        rows: Rows of each rank's batch.
        length: Tokens per row.
        degrees: Tensor-parallel degrees that plans may use.
        optimizer: What its optimizer keeps.
        device_kind: ``"cpu"`` or ``"cuda"``.
        capability: CUDA's compute capability; an A100's where it is not known.

    Returns:
        None where such a model was never traced in this precision for such a device: then it has to be.
    """
    forms = load_forms(shape, precision, device_class(device_kind, capability))
    if forms is None or not all(limit >= shape.head_width for limit in (_FLASH_WIDTH,)) or shape.head_width % 8:
        return None
    dtype = "float32" if precision == "32-true" or precision.endswith("-mixed") else forms.half
    itemsize = 4 if dtype == "float32" else 2
    known = _parameters(shape, length, itemsize)
    whole = forms.parts(shape, length)
    return ModelSpec(
        name=name,
        module_map=preset_map(shape, rows=rows, length=length, degrees=degrees, dtype=dtype),
        head=whole.head,
        layers=(whole.layer,),
        kinds=(0,) * shape.layers,
        tail=whole.tail,
        boundaries=_boundaries(shape, dtype, itemsize, 1),
        parameters=known,
        buffer_bytes=0,
        # Ids of tokens and of those that follow, 8 bytes each.
        batch_bytes=16 * MICROBATCH * SEQUENCE,
        batch_rows=rows,
        sequence_length=length,
        optimizer=optimizer,
        precision=precision,
        device_kind=device_kind,
        shared_saved_bytes=forms.shared(shape, length),
        splits=tuple(
            _split(forms, shape, length, degree, sequence, [item.bytes for item in known], dtype, itemsize)
            for degree in sorted({*degrees} - {1})
            if divides(shape, degree)
            for sequence in (False, True)
        ),
    )


_FLASH_WIDTH = 192
"""Heads up to this width run the attention that was traced on every device (torch's sdp_utils.cpp)."""


def _parameters(shape: LanguageModelShape, length: int, itemsize: int) -> tuple[ParameterSpec, ...]:
    numels = {name: int(sympy.prod(sizes)) for name, sizes, _ in parameters(shape, length)}
    return tuple(
        ParameterSpec(name=name, numel=numel, bytes=numel * itemsize, trainable=True) for name, numel in numels.items()
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
