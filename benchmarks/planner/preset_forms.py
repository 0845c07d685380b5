"""Make the files of :mod:`lightning_mist.model.presets.specs`: trace language models of three sizes, find
the sums.

    python -m benchmarks.planner.preset_forms [--family gpt3] [--precision bf16-true] [--device cuda80]

Every coefficient of the three traces is written as a sum of few products of widths with small rational factors, by
lattice reduction (Lenstra, Lenstra and Lovasz, 1982): widths are large and have no small relations, so there is one.
Traces of one rank's part are taken at two degrees ``t`` and are taken to be ``x + y / t``; the tests of the package
compare the files with traces of other sizes and degrees.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import sympy
import torch

import lightning_mist.model.presets.specs as package
from benchmarks.planner.lattice import reduced
from lightning_mist.model import device_operators, trace_model
from lightning_mist.model.presets.named_models import LanguageModelShape
from lightning_mist.model.presets.specs import FAMILIES, PRECISIONS, preset_map, widths
from lightning_mist.model.sources.reference_decoder import LanguageModel, hollow
from lightning_mist.model.sources.text_sources import parameter_dtype, precision_context
from lightning_mist.model.spec.model_spec import LayerSpec, ModelSpec
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE, Polynomial

VERSION = 1
"""Of the files' layout."""

ROWS = 8
DEGREES = (2, 8)
CAPABILITIES = {"cuda80": (8, 0), "cuda70": (7, 0)}
KEPT = tuple(sorted({tuple(name.split("_")) for known in PRECISIONS.values() for name in known.values()}))

# hidden = heads x (64, 128, 80), everything else times a large prime, so that no small sum of products is zero
SIZES = (
    ({"hidden": 549376, "heads": 8584, "ffn": 8 * 30000001, "vocabulary": 8 * 5000000029}, 232, 1000),
    ({"hidden": 730112, "heads": 5704, "ffn": 8 * 20000003, "vocabulary": 8 * 3000000019}, 248, 2048),
    ({"hidden": 498560, "heads": 6232, "ffn": 8 * 25000009, "vocabulary": 8 * 4000000007}, 328, 1512),
)

MONOMIALS = {
    "head": ("", "h", "v", "p", "v h", "p h"),
    "layer": ("", "a", "w", "h", "f", "h h", "h f"),
    "tail": ("", "h", "v", "v h"),
}
GROUPED = ("g", "k", "h k")
ROUNDED = {"flash": ("x",), "efficient": ("y",)}

UNDER = (1, 2, 4, 8, 16, 32, 64)
"""Factors are multiples of one over the first of these with which there are such."""

LARGEST = 400
"""No factor is larger."""


@dataclass(frozen=True)
class Sample:
    """One traced network."""

    shape: LanguageModelShape
    length: int
    spec: ModelSpec


def sample(family: str, precision: str, device: str, which: int) -> Sample:
    """Trace a network of one of :data:`SIZES`."""
    sizes, groups, length = SIZES[which]
    choices = dict(FAMILIES[family])
    grouped = choices.pop("grouped")
    shape = LanguageModelShape(layers=2, **sizes, **choices, key_value_heads=groups if grouped else None)  # type: ignore[arg-type]
    dtype, context = parameter_dtype(precision), precision_context(precision)
    module = hollow(lambda: LanguageModel(shape, length), dtype=dtype)
    tokens = torch.zeros(ROWS, length, dtype=torch.long)
    batch = (tokens, tokens.clone())

    def call(item: Any) -> Any:
        with context():
            return module.training_step(item, 0)  # type: ignore[operator]

    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    known = preset_map(shape, rows=ROWS, length=length, degrees=DEGREES, dtype=name)
    operators = device_operators("cuda", capability=CAPABILITIES[device])
    spec = trace_model(
        module, batch, call=call, module_map=known, optimizer=torch.optim.AdamW, precision=precision,
        device_kind=operators,
    )  # fmt: skip
    return Sample(shape=shape, length=length, spec=spec)


@dataclass
class Writer:
    """Collects what a file says.

    Attributes:
        numbers: The widths of every sample.
        grouped: Whether heads of keys and values are fewer than of queries.
        attention: Which one runs, of :data:`ROUNDED`.
        monomials, forms, texts: What is referred to by number.
    """

    numbers: Sequence[Mapping[str, int]]
    grouped: bool
    attention: str
    monomials: dict[str, int] = field(default_factory=dict)
    forms: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)

    def text(self, value: str) -> int:
        return self.texts.setdefault(value, len(self.texts))

    def form(self, part: str, values: Sequence[Any]) -> int:
        """The number of the form of what every trace says: of the whole network, or at :data:`DEGREES` by turns."""
        polynomials = [coefficients(value) for value in values]
        entries = []
        for powers in sorted({key for item in polynomials for key in item}):
            column = [item.get(powers, Fraction(0)) for item in polynomials]
            entries.append([*powers, self._products(part, column)])
        key = json.dumps(entries)
        return self.forms.setdefault(key, len(self.forms))

    def _products(self, part: str, column: Sequence[Fraction]) -> list[list[int]]:
        if len(column) == len(self.numbers):
            return self._sum(part, column, "")
        first, second = (column[index :: len(DEGREES)] for index in range(2))
        gap = Fraction(1, DEGREES[0]) - Fraction(1, DEGREES[1])
        shared = [(a - b) / gap for a, b in zip(first, second, strict=True)]
        fixed = [a - item / DEGREES[0] for a, item in zip(first, shared, strict=True)]
        return [*self._sum(part, fixed, ""), *self._sum(part, shared, " /t")]

    def _sum(self, part: str, column: Sequence[Fraction], suffix: str) -> list[list[int]]:
        names = MONOMIALS[part]
        if part == "layer":
            names += ROUNDED[self.attention] + (GROUPED if self.grouped else ())
        key = (part, tuple(column))
        if key not in self.known:
            self.known[key] = small_sum(column, [[product(name, item) for item in self.numbers] for name in names])
        found = []
        for name, factor in zip(names, self.known[key], strict=True):
            if factor:
                text = f"{name}{suffix}".strip()
                found.append(
                    [self.monomials.setdefault(text, len(self.monomials)), factor.numerator, factor.denominator]
                )
        return found


def product(name: str, numbers: Mapping[str, int]) -> int:
    value = 1
    for letter in name.split():
        value *= numbers[letter]
    return value


def small_sum(column: Sequence[Fraction], rows: Sequence[Sequence[int]]) -> list[Fraction]:
    """Small rational factors with which rows add up to a column."""
    if not any(column):
        return [Fraction(0)] * len(rows)
    for index, row in enumerate(rows):
        ratios = {value / item for value, item in zip(column, row, strict=True)}
        if len(ratios) == 1 and (ratio := ratios.pop()).denominator <= UNDER[-1] and abs(ratio) <= LARGEST:
            return [ratio if place == index else Fraction(0) for place in range(len(rows))]
    for pair in combinations(range(len(rows)), 2):
        factors = solve_two(column, *(rows[index] for index in pair))
        if factors is not None:
            return [factors[pair.index(place)] if place in pair else Fraction(0) for place in range(len(rows))]
    for under in UNDER:
        if all((value * under).denominator == 1 for value in column):
            found = shortest(column, rows, under)
            if found is not None and max(abs(item) for item in found) <= LARGEST:
                return found
    raise ValueError(f"{column}: no sum of {rows} with small factors")


def shortest(column: Sequence[Fraction], rows: Sequence[Sequence[int]], under: int) -> list[Fraction] | None:
    """Factors that are multiples of one over a number, of the shortest vector of the lattice that has such."""
    weight = 10**9
    matrix = [
        [*(int(place == index) for place in range(len(rows))), 0, *(weight * item for item in row)]
        for index, row in enumerate(rows)
    ]
    matrix.append([*([0] * len(rows)), 1, *(-weight * int(item * under) for item in column)])
    for line in reduced(matrix):
        factors, sign, rest = line[: len(rows)], line[len(rows)], line[len(rows) + 1 :]
        if abs(sign) == 1 and not any(rest):
            return [Fraction(int(item) * int(sign), under) for item in factors]
    return None


def solve_two(column: Sequence[Fraction], one: Sequence[int], other: Sequence[int]) -> tuple[Fraction, Fraction] | None:
    """Small factors of two rows; two equations say which, and the third one whether they are right."""
    base = one[0] * other[1] - one[1] * other[0]
    if not base:
        return None
    found = (
        (column[0] * other[1] - column[1] * other[0]) / base,
        (column[1] * one[0] - column[0] * one[1]) / base,
    )
    is_small = all(item.denominator <= UNDER[-1] and abs(item) <= LARGEST for item in found)
    is_right = found[0] * one[2] + found[1] * other[2] == column[2]
    return found if is_small and is_right else None


def coefficients(value: Any) -> dict[tuple[int, int], Fraction]:
    """Of an expression or a polynomial, by powers of rows and length."""
    if isinstance(value, Polynomial):
        pairs: Iterable[Any] = zip(value.powers, value.coefficients, strict=True)
        return {powers: Fraction(item, value.denominator) for powers, item in pairs if item}
    found = sympy.Poly(value, MICROBATCH, SEQUENCE).terms()
    return {powers: Fraction(int(item.p), int(item.q)) for powers, item in found if item}


def same(values: Sequence[Any], what: str) -> Any:
    """What must not depend on sizes."""
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} differs: {values}")
    return values[0]


def encode_part(writer: Writer, name: str, parts: Sequence[LayerSpec]) -> dict[str, Any]:
    """A part, as every trace says."""

    def fit(attribute: str) -> int:
        return writer.form(name, [getattr(part, attribute) for part in parts])

    def work(attribute: str, of: Sequence[Any] = parts) -> list[Any]:
        rows = []
        for items in zip(*(getattr(part, attribute) for part in of), strict=True):
            kind, calls = (
                same([getattr(item, key) for item in items], f"{name} {attribute} {key}") for key in ("kind", "calls")
            )
            flops, moved = (
                writer.form(name, [getattr(item, key) for item in items]) for key in ("flops", "moved_bytes")
            )
            rows.append([kind, flops, moved, calls])
        return rows

    def collectives(attribute: str) -> list[Any]:
        return [
            [
                same([item.operation for item in items], "operation"),
                same([item.calls for item in items], "calls"),
                writer.form(name, [item.bytes for item in items]),
            ]
            for items in zip(*(getattr(part, attribute) for part in parts), strict=True)
        ]

    ways: list[Any] = []
    for item in events_of(parts):
        encoded = encode_way(writer, name, item)
        ways.append(ways.index(encoded) if encoded in ways else encoded)
    again = [part.selective for part in parts if part.selective is not None]
    return {
        "kind": same([part.kind for part in parts], "kind"),
        "example": same([part.example for part in parts], "example"),
        "forward_work": work("forward_work"),
        "backward_work": work("backward_work"),
        "saved": fit("saved_bytes"),
        "checkpointed": fit("checkpointed_saved_bytes"),
        "weight_flops": fit("weight_flops"),
        "weight_bytes": fit("weight_bytes"),
        "forward_collectives": collectives("forward_collectives"),
        "backward_collectives": collectives("backward_collectives"),
        "ways": ways,
        "selective": {"saved": writer.form(name, [item.saved_bytes for item in again]), "work": work("work", again)},
    }


def events_of(parts: Sequence[LayerSpec]) -> Iterator[list[Any]]:
    """What every trace says of each way to run a part, of those by operator last."""
    for way in ("first", "later", "recomputed_first", "recomputed_later"):
        yield [getattr(part.events, way) for part in parts]
    for index in range(2):
        yield [part.selective.events[index] for part in parts]  # type: ignore[union-attr, index]


def encode_way(writer: Writer, name: str, ways: Sequence[Any]) -> dict[str, Any]:
    """One way to run a part."""

    def moment(item: Any) -> Any:
        return (
            None if item is None else [item.part, writer.text(item.anchor), writer.text(item.direction), item.position]
        )

    def releases(attribute: str) -> list[Any]:
        found = same([getattr(way, attribute) for way in ways], attribute)
        return [[item.slot, moment(item.dies), [writer.text(each) for each in item.weights]] for item in found]

    def allocations(direction: str) -> list[Any]:
        rows = []
        for items in zip(*(getattr(way, direction) for way in ways), strict=True):
            one = same([replace(item, size=Polynomial.constant(0)) for item in items], f"{name} {direction}")
            assert (one.born.part, one.born.anchor, one.born.direction) == (0, "own", direction)
            words = (one.role, one.parameter, one.module, one.operator, one.dtype)
            rows.append([
                writer.form(name, [item.size for item in items]), one.born.position, moment(one.dies), one.slot,
                *map(writer.text, words), [writer.text(each) for each in one.weights],
            ])  # fmt: skip
        return rows

    return {
        "forward": allocations("forward"),
        "backward": allocations("backward"),
        "positions": same([[way.forward_positions, way.backward_positions] for way in ways], "positions"),
        "entering": releases("entering"),
        "arriving": releases("arriving"),
        "reading": [writer.text(each) for each in same([way.reading for way in ways], "reading")],
    }


def forms_of(samples: Sequence[Sample], *, is_efficient: bool) -> dict[str, Any]:
    """What a file says, of networks with memory-efficient attention or with flash attention."""
    numbers = [widths(item.shape, item.length) for item in samples]
    writer = Writer(
        numbers=numbers,
        grouped=samples[0].shape.key_value_heads is not None,
        attention="efficient" if is_efficient else "flash",
    )
    variants = {}
    for name in ("whole", "split", "sequence"):
        if name == "whole":
            specs = [item.spec for item in samples]
        else:
            specs = [item.spec.split(degree, name == "sequence") for item in samples for degree in DEGREES]
        variants[name] = {
            "head": encode_part(writer, "head", [spec.head for spec in specs]),
            "layer": encode_part(writer, "layer", [spec.layers[0] for spec in specs]),
            "tail": encode_part(writer, "tail", [spec.tail for spec in specs]),
        }
    shared = writer.form("head", [item.spec.shared_saved_bytes for item in samples])
    return {
        "version": VERSION,
        "torch": torch.__version__.partition("+")[0],
        "shared": shared,
        "variants": variants,
        "monomials": list(writer.monomials),
        "forms": [json.loads(text) for text in writer.forms],
        "texts": list(writer.texts),
    }


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write a file; the same content makes the same bytes."""
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(FAMILIES))
    parser.add_argument("--precision")
    parser.add_argument("--device", choices=tuple(CAPABILITIES))
    chosen = parser.parse_args()
    folder = Path(package.__file__).parents[1] / "data"
    for family in FAMILIES if chosen.family is None else (chosen.family,):
        for precision, device in KEPT:
            if chosen.precision in (None, precision) and chosen.device in (None, device):
                samples = [sample(family, precision, device, which) for which in range(len(SIZES))]
                path = folder / f"{family}_{precision}_{device}.json.gz"
                is_efficient = device == "cuda70" or precision == "32-true"
                write(forms_of(samples, is_efficient=is_efficient), path)
                print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
