"""Estimates of transformers that were not traced, from the sizes that their configuration states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_mist.estimate.closed_form.layer_bytes import CPU, CUDA, OperatorSet, layer_form
from lightning_mist.estimate.closed_form.network_sizes import TransformerDims, dims_of
from lightning_mist.estimate.closed_form.network_spec import closed_form_spec
from lightning_mist.estimate.closed_form.transformer_form import ClosedForm
from lightning_mist.model.presets import LanguageModelShape
from lightning_mist.model.spec import ModelSpec, OptimizerSpec, bytes_at

if TYPE_CHECKING:
    from torch import nn


ALIKE = 5e-4
"""Share by which two counts of bytes may differ and still be shown as the same percentage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """What a trace and the closed form say of one layer.

    Attributes:
        unit_bytes: Bytes of one hidden state, ``s b h`` elements.
    """

    traced_bytes: int
    closed_bytes: int
    operators: str
    unit_bytes: int

    @property
    def ratio(self) -> float:
        """Traced over closed."""
        return self.traced_bytes / self.closed_bytes

    @property
    def text(self) -> str:
        """Both, in words; hidden states are what the published formulas count in."""
        traced, closed = (count / self.unit_bytes for count in (self.traced_bytes, self.closed_bytes))
        if abs(self.ratio - 1) < ALIKE:
            return f"each layer keeps {traced:.2f} hidden states, as the closed form for {self.operators} says"
        return (
            f"each layer keeps {traced:.2f} hidden states; the closed form for {self.operators} says {closed:.2f}, the "
            f"trace {abs(self.ratio - 1):.1%} {'more' if self.ratio > 1 else 'less'}: the module computes by other "
            "operators than it assumes"
        )


def cross_check(spec: ModelSpec, dims: TransformerDims, operators: OperatorSet = CUDA) -> CrossCheck:
    """What a traced layer keeps beside the closed form.

    Args:
        spec: What was traced, in one of Lightning's precisions: layers over sequences, as many as the sizes say.
    """
    kind, _, how = spec.precision.partition("-")
    itemsize = {"16": 2, "bf16": 2, "64": 8}.get(kind, 4)
    rows, length = spec.batch_rows, spec.sequence_length or 1
    return CrossCheck(
        traced_bytes=bytes_at(spec.layers[spec.kinds[0]].saved_bytes, rows, length),
        closed_bytes=layer_form(dims, operators, itemsize=itemsize, mixed=how == "mixed").at(rows, length),
        operators=operators.name,
        unit_bytes=rows * length * dims.hidden * itemsize,
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
        rotary=shape.rotary_fraction > 0,
        rotation="concatenation",
        rotated_width=int(shape.hidden // shape.heads * shape.rotary_fraction) // 2 * 2,
        fused_query_key_value=shape.key_value_heads is None,
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


def operators_of(kind: str) -> OperatorSet:
    """The operators that a closed form assumes on a kind of device."""
    return CUDA if kind == "cuda" else CPU


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
        device_kind: ``"cuda"`` or ``"cpu"``: whose operators compute.

    Raises:
        PlanError: If a degree does not divide heads and widths.
    """
    form = ClosedForm(
        dims=dims,
        optimizer=optimizer,
        sequence_length=sequence_length,
        batch_rows=rows,
        precision=precision,
        operators=operators_of(device_kind),
    )
    return replace(closed_form_spec(form, degrees, name=name), device_kind=device_kind)


def with_second_opinion(spec: ModelSpec, module: "nn.Module", device_kind: str) -> ModelSpec:
    """A traced specification with a note on what the closed form says, if the module states its sizes."""
    dims = None if spec.sequence_length is None else module_dims(module, spec.sequence_length)
    if dims is None or dims.layers != spec.num_layers:
        return spec
    checked = cross_check(spec, dims, operators_of(device_kind))
    return replace(spec, notes=(*spec.notes, f"second opinion: {checked.text}"))
