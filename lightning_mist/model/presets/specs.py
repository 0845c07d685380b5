"""The specification of a preset: as a trace of it would say, in a moment and without torch."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources import files
from math import lcm
from typing import Any

import sympy

from lightning_mist.model.events import part_peaks, selective_peaks
from lightning_mist.model.presets.named_models import LanguageModelShape
from lightning_mist.model.spec import (
    MICROBATCH,
    SEQUENCE,
    Allocation,
    CollectiveSpec,
    LayerEvents,
    LayerSpec,
    ModelSpec,
    OperatorCost,
    OptimizerSpec,
    ParameterSpec,
    PartEvents,
    Polynomial,
    Release,
    SelectiveSpec,
    SplitSpec,
    StepPoint,
    TensorSpec,
)
from lightning_mist.plan import LiveTensor, ModuleMap, ParameterUse
from lightning_mist.plan.tensor_split import Factors, ParameterSplit, SequenceSplit, TensorSplit

# What presets cost, without a trace: traces of language models as expressions in all of their sizes.
#
# A trace says what a module of certain sizes costs, as polynomials in rows and length. Their coefficients are sums of
# products of the module's widths, and, of one tensor-parallel rank, of such over the degree. Those sums were found
# once, from traces of networks of three sizes, and lie beside this module, one file for each family of blocks,
# precision, and kind of device (:mod:`benchmarks.planner.preset_forms` makes them). Put in a preset's own widths, and
# what comes out is the trace of that preset, every allocation of it.
#
# One thing depends on sizes in another way: with one head of keys and values on each tensor-parallel rank torch makes
# two copies of keys and values fewer. Forms count them, which is less than 2 % of a layer's seconds.

_GPT = {"feed_forward": "gelu", "norm": "layernorm", "parallel": False, "rotary_fraction": 0.0, "grouped": False}
_LLAMA = {"feed_forward": "swiglu", "norm": "rmsnorm", "parallel": False, "rotary_fraction": 0.25, "grouped": False}

FAMILIES: Mapping[str, Mapping[str, object]] = {
    "gpt3": _GPT,
    "falcon": {**_GPT, "parallel": True, "rotary_fraction": 0.25},
    "llama": _LLAMA,
    "llama3": {**_LLAMA, "rotary_fraction": 1.0, "grouped": True},
}
"""Choices that make blocks run other operators, by the name that files go by."""

PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "cuda80": {
        "32-true": "32-true_cuda80",
        "bf16-true": "bf16-true_cuda80",
        "16-true": "bf16-true_cuda80",
        "bf16-mixed": "bf16-mixed_cuda80",
        "16-mixed": "bf16-mixed_cuda80",
    },
    "cuda70": {
        "32-true": "32-true_cuda80",
        "16-true": "16-true_cuda70",
        "16-mixed": "16-mixed_cuda70",
    },
}
"""By class of device, precisions, and under which name their files lie.

From compute capability 8.0 on both types of 16 bits run the same operators, flash attention among them. Before, float16
runs memory-efficient attention, as float32 does everywhere; bfloat16 runs no fused attention there.
"""

WIDEST_HEADS: Mapping[str, int] = {"cuda80": 192, "cuda70": 128}
"""By class of device, the width of heads up to which attention runs and keeps what was traced: flash attention's
backward on every device (torch's sdp_utils.cpp), memory-efficient attention without a buffer for its output
(kernel_forward.h, kNeedsOutputAccumulatorBuffer)."""


def family_of(shape: LanguageModelShape) -> str | None:
    """The family of a model's blocks; None if there is no such file."""
    choices = {
        "feed_forward": shape.feed_forward,
        "norm": shape.norm,
        "parallel": shape.parallel,
        "rotary_fraction": shape.rotary_fraction,
        "grouped": shape.key_value_heads is not None,
    }
    return next((name for name, found in FAMILIES.items() if found == choices and not shape.tied), None)


def widths(shape: LanguageModelShape, length: int) -> dict[str, int]:
    """The numbers that coefficients are made of, by the letters that files use."""
    return {
        "h": shape.hidden,
        "f": shape.ffn,
        "a": shape.heads,
        "g": shape.key_value_heads or shape.heads,
        "k": shape.key_value_width,
        "w": shape.head_width,
        "v": shape.vocabulary,
        "p": length,
        # Attention's backward sums up gradients of queries in rows that are rounded up: of flash attention to 32, of
        # the memory-efficient one to 64 entries.
        "x": shape.heads * -(-shape.head_width // 32) * 32,
        "y": shape.heads * -(-shape.head_width // 64) * 64,
    }


_PARTS = ("head", "layer", "tail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """A file of forms."""

    data: Mapping[str, Any]
    half: str  # the element type of 16 bits that takes the place of the one that was traced

    def shared(self, shape: LanguageModelShape, length: int) -> sympy.Expr:
        """:attr:`~lightning_mist.model.spec.model_spec.ModelSpec.shared_saved_bytes`."""
        return _Filled(self, widths(shape, length), 1).expression(self.data["shared"])

    def parts(
        self, shape: LanguageModelShape, length: int, *, degree: int = 1, sequence_parallel: bool = False
    ) -> list[LayerSpec]:
        """What head, layer and tail cost in rows of ``length`` tokens, whole or on one of ``degree`` ranks."""
        name = "whole" if degree == 1 else "sequence" if sequence_parallel else "split"
        filled = _Filled(self, widths(shape, length), degree)
        data = self.data["variants"][name]
        events, again = zip(*(filled.events(data[part]["ways"]) for part in _PARTS), strict=True)
        peaks = part_peaks(*events)
        found = zip(_PARTS, events, peaks, strict=True)
        parts = [filled.part(data[part], event, peak) for part, event, peak in found]
        if any("selective" not in data[part] for part in _PARTS):
            return parts
        names = ("forward_peak_bytes", "backward_peak_bytes", "first_backward_peak_bytes")
        edges = [{name: peak[name] for name in names} for peak in peaks]
        edges[1] = selective_peaks(*again)
        return [
            replace(item, selective=filled.selective(data[part]["selective"], event, peak))
            for part, item, event, peak in zip(_PARTS, parts, again, edges, strict=True)
        ]


def load_forms(shape: LanguageModelShape, precision: str, device_class: str) -> Forms | None:
    """The forms of a model's family in a precision of Lightning's name; None if there are none for its sizes."""
    family, kept = family_of(shape), PRECISIONS.get(device_class, {}).get(precision)
    if family is None or kept is None or shape.head_width > WIDEST_HEADS[device_class] or shape.head_width % 8:
        return None
    place = files("lightning_mist.model") / "data" / f"{family}_{kept}.json.gz"
    if not place.is_file():
        return None
    data = json.loads(gzip.decompress(place.read_bytes()))
    return Forms(data=data, half="float16" if precision.startswith("16") else "bfloat16")


def device_class(kind: str, capability: tuple[int, int] | None) -> str:
    """Devices of a kind, ``"cpu"`` or ``"cuda"``, that run the same operators; by default as an A100."""
    return kind if kind != "cuda" else "cuda80" if (capability or (8, 0)) >= (8, 0) else "cuda70"


class _Filled:
    def __init__(self, forms: Forms, numbers: Mapping[str, int], degree: int) -> None:
        self._half, self._texts = forms.half, forms.data["texts"]
        monomials = [_monomial(text, numbers, degree) for text in forms.data["monomials"]]
        self._polynomials = [_polynomial(form, monomials) for form in forms.data["forms"]]
        self._expressions: dict[int, sympy.Expr] = {}

    def expression(self, form: int) -> sympy.Expr:
        if form not in self._expressions:
            self._expressions[form] = self._polynomials[form].expression
        return self._expressions[form]

    def part(self, data: Mapping[str, Any], events: LayerEvents, peaks: Mapping[str, Any]) -> LayerSpec:
        fill = self.expression
        return LayerSpec(
            kind=data["kind"],
            example=data["example"],
            forward_work=self._work(data["forward_work"]),
            backward_work=self._work(data["backward_work"]),
            saved_bytes=fill(data["saved"]),
            checkpointed_saved_bytes=fill(data["checkpointed"]),
            **peaks,
            weight_flops=fill(data["weight_flops"]),
            weight_bytes=fill(data["weight_bytes"]),
            forward_collectives=self._collectives(data["forward_collectives"]),
            backward_collectives=self._collectives(data["backward_collectives"]),
            events=events,
        )

    def _work(self, data: Sequence[Any]) -> tuple[OperatorCost, ...]:
        """Products of one size are one entry: sizes may be equal in one network and not in another."""
        found: dict[tuple[Any, ...], OperatorCost] = {}
        for kind, flops, moved, calls in data:
            item = OperatorCost(
                kind=kind, flops=self.expression(flops), moved_bytes=self.expression(moved), calls=calls
            )
            key = (kind, item.flops / calls, item.moved_bytes / calls)
            if (before := found.get(key)) is not None:
                total, size = before.flops + item.flops, before.moved_bytes + item.moved_bytes
                item = OperatorCost(kind=kind, flops=total, moved_bytes=size, calls=before.calls + calls)
            found[key] = item
        return tuple(found.values())

    def _collectives(self, data: Sequence[Any]) -> tuple[CollectiveSpec, ...]:
        return tuple(
            CollectiveSpec(operation=operation, calls=calls, bytes=self.expression(size))
            for operation, calls, size in data
        )

    def events(self, ways: Sequence[Any]) -> tuple[LayerEvents, LayerEvents]:
        """Every allocation of a part, with layers recomputed by all operators and by some, if that is known.

        A number stands for a way told before.
        """
        found: list[PartEvents] = []
        for way in ways:
            found.append(found[way] if isinstance(way, int) else self._way(way))
        first, later, *_ = found
        return (
            LayerEvents(first=first, later=later, recomputed_first=found[2], recomputed_later=found[3]),
            LayerEvents(first=first, later=later, recomputed_first=found[-2], recomputed_later=found[-1]),
        )

    def selective(self, data: Mapping[str, Any], events: LayerEvents, peaks: Mapping[str, Any]) -> SelectiveSpec:
        """What a part costs where layers are recomputed by operator."""
        return SelectiveSpec(
            saved_bytes=self.expression(data["saved"]),
            **peaks,
            work=self._work(data["work"]),
            events=(events.recomputed_first, events.recomputed_later),
        )

    def _way(self, data: Mapping[str, Any]) -> PartEvents:
        texts = self._texts
        return PartEvents(
            forward=tuple(self._allocation("forward", item) for item in data["forward"]),
            backward=tuple(self._allocation("backward", item) for item in data["backward"]),
            forward_positions=data["positions"][0],
            backward_positions=data["positions"][1],
            entering=tuple(self._release(item) for item in data["entering"]),
            arriving=tuple(self._release(item) for item in data["arriving"]),
            reading=tuple(texts[item] for item in data["reading"]),
        )

    def _allocation(self, direction: Any, data: Sequence[Any]) -> Allocation:
        size, born, dies, slot, *words, weights = data
        role, parameter, module, operator, dtype = (self._texts[item] for item in words)
        return Allocation(
            size=self._polynomials[size],
            born=StepPoint(direction=direction, position=born),
            dies=None if dies is None else self._moment(dies),
            slot=slot,
            role=role,
            parameter=parameter,
            weights=tuple(self._texts[item] for item in weights),
            module=module,
            operator=operator,
            line="",
            dtype=self._half if dtype == "bfloat16" else dtype,
        )

    def _release(self, data: Sequence[Any]) -> Release:
        slot, dies, weights = data
        return Release(slot=slot, dies=self._moment(dies), weights=tuple(self._texts[item] for item in weights))

    def _moment(self, data: Sequence[Any]) -> StepPoint:
        part, anchor, direction, position = data
        return StepPoint(part=part, anchor=self._texts[anchor], direction=self._texts[direction], position=position)


def _monomial(text: str, numbers: Mapping[str, int], degree: int) -> Fraction:
    """The value of a product of widths such as ``"h h"``, or of one rank's part of it, ``"h h /t"``."""
    value = Fraction(1)
    for factor in text.split():
        value = value / degree if factor == "/t" else value * numbers[factor]
    return value


def _polynomial(form: Sequence[Any], monomials: Sequence[Fraction]) -> Polynomial:
    """The polynomial in rows and length of a form, whose coefficients are sums of ``[monomial, over, under]``."""
    terms = []
    for rows, length, products in form:
        value = sum((monomials[index] * Fraction(over, under) for index, over, under in products), Fraction(0))
        if value:
            terms.append(((rows, length), value))
    if not terms:
        return Polynomial.constant(0)
    denominator = lcm(*(value.denominator for _, value in terms))
    return Polynomial(
        tuple(powers for powers, _ in terms), tuple(int(value * denominator) for _, value in terms), denominator
    )


KNOWN_OPTIMIZERS = {
    "AdamW": OptimizerSpec(
        name="AdamW",
        state_bytes_per_parameter_byte=2.0,
        step_peak_bytes_per_parameter_byte=1.0,
        step_peak_bytes_per_largest=0.0,
        step_moved_bytes_per_parameter_byte=20.0,
        is_entrywise=True,
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

    def split(degree: int, sequence_parallel: bool) -> SplitSpec:
        head, layer, tail = forms.parts(shape, length, degree=degree, sequence_parallel=sequence_parallel)
        shared = {item.name for item in split_of(shape, length, degree).parameters}
        return SplitSpec(
            degree=degree,
            sequence_parallel=sequence_parallel,
            head=head,
            layers=(layer,),
            tail=tail,
            boundaries=_boundaries(shape, dtype, itemsize, degree if sequence_parallel else 1),
            parameter_bytes=tuple(item.bytes // degree if item.name in shared else item.bytes for item in known),
        )

    head, layer, tail = forms.parts(shape, length)
    return ModelSpec(
        name=name,
        module_map=preset_map(shape, rows=rows, length=length, degrees=degrees, contexts=contexts, dtype=dtype),
        head=head,
        layers=(layer,),
        kinds=(0,) * shape.layers,
        tail=tail,
        boundaries=_boundaries(shape, dtype, itemsize, 1),
        parameters=tuple(known),
        buffer_bytes=0,
        # Ids of tokens and of those that follow, 8 bytes each.
        batch_bytes=16 * MICROBATCH * SEQUENCE,
        batch_rows=rows,
        sequence_length=length,
        optimizer=optimizer,
        precision=precision,
        head_width=shape.head_width,
        shared_saved_bytes=forms.shared(shape, length),
        splits=tuple(
            split(degree, sequence)
            for degree in sorted({*degrees} - {1})
            if divides(shape, degree)
            for sequence in (False, True)
        ),
    ).evenly()


def _boundaries(shape: LanguageModelShape, dtype: str, itemsize: int, parts: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """The hidden states that cross each cut, or one rank's part of the sequence."""
    hidden = TensorSpec(
        shape=(MICROBATCH, SEQUENCE / parts, sympy.Integer(shape.hidden)),
        dtype=dtype,
        itemsize=itemsize,
        requires_grad=True,
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
        cuts=tuple((cut,) for cut in cuts),
        parameters=tuple(
            ParameterUse(name=name, slots=((owner, last, (region,)),), shape=sizes, dtype=dtype, requires_grad=True)
            for name, sizes, region in parameters(shape, length)
            for owner, _, last in (name.rpartition("."),)
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
