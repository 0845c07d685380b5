"""Two runs of one computation, whole and over ranks, held against each other number by number."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mist.plan.tensor_split import ParameterSplit
from lightning_mist.tensor_parallel import part_of

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference relative to a tensor's largest entry, by the least exact type that took part. Shared-out sums are
summed in another order: a few hundred roundings of 1e-16 or 6e-8."""

_COARSE_TOLERANCE = 5e-2  # largest relative difference of 16-bit numbers: 2^-8 per rounding, some ten of them

_FLOOR = 1e-3
"""Tensors whose entries are all below this part of the largest of any are compared as if they were that large: some
gradients are zero but for rounding (of the keys' biases under softmax, for example)."""

_PIECE = 2**20  # numbers that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run: what came out, and the gradients of inputs and parameters."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor | None, ...]
    parameters: dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The whole run, to which those of ranks are compared."""

    result: Result
    sizes: Mapping[str, float]  # the largest entry of each of its tensors, by its name in messages
    tolerance: float  # the largest difference relative to these

    @classmethod
    def of(cls, result: Result, coarsest: torch.dtype) -> "Reference":
        """A run that was computed in no coarser type than this one."""
        sizes = {name: 0.0 if tensor is None else _largest(tensor) for name, tensor in _named(result).items()}
        return cls(result=result, sizes=sizes, tolerance=_TOLERANCES.get(coarsest, _COARSE_TOLERANCE))

    def difference(
        self, ranks: Sequence[Result], splits: Sequence[ParameterSplit], summands: Container[str] = ()
    ) -> str | None:
        """What differs most on any rank, in words; None if nothing does by more than the tolerance.

        Of the gradients of parameters in ``summands`` every rank has one that adds up to the whole one.
        """
        wanted, of_name = _named(self.result), {_gradient_of(split.name): split for split in splits}
        worst, text = self.tolerance, None
        added = {_gradient_of(name): _added(ranks, name) for name in self.result.parameters if name in summands}
        for rank, result in enumerate(ranks):
            found = _named(result)
            if found.keys() != wanted.keys():
                return f"rank {rank} gives {len(found)} results and gradients instead of {len(wanted)}"
            for name, tensor in wanted.items():
                part, given = tensor, added.get(name, found[name])
                if tensor is not None and given is not None and name in of_name:
                    split = of_name[name]
                    if tuple(given.shape) != split.local_shape(tuple(tensor.shape), len(ranks)):
                        return f"the {name} has shape {tuple(given.shape)} on rank {rank}"
                    part = part_of(tensor, split, rank, len(ranks))
                relative = _relative(part, given, max(self.sizes[name], self._floor(name)))
                if not relative <= worst:
                    worst = relative
                    text = f"the {name} differs by {relative:.1e} of its size, the tolerance is {self.tolerance:.0e}"
        return text

    def _floor(self, name: str) -> float:
        kind = next(kind for kind in _KINDS if name.startswith(kind))
        return _FLOOR * max(size for other, size in self.sizes.items() if other.startswith(kind))


_KINDS = ("result", "gradient of input", "gradient of parameter")
"""What is compared; sizes of one kind are compared with each other."""


def _gradient_of(name: str) -> str:
    return f"{_KINDS[2]} {name}"


def _added(ranks: Sequence[Result], name: str) -> Tensor | None:
    given = [gradient for result in ranks if (gradient := result.parameters[name]) is not None]
    return torch.stack(given).sum(0) if given else None


def _named(result: Result) -> dict[str, Tensor | None]:
    return {
        **{f"{_KINDS[0]} {index}": tensor for index, tensor in enumerate(result.outputs)},
        **{f"{_KINDS[1]} {index}": tensor for index, tensor in enumerate(result.inputs)},
        **{_gradient_of(name): tensor for name, tensor in result.parameters.items()},
    }


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item()) if low.isfinite() and high.isfinite() else float("nan")


def _relative(expected: Tensor | None, found: Tensor | None, size: float) -> float:
    """Largest difference relative to a size; not a number if there are entries that are none."""
    if expected is None or found is None:
        alone = found if expected is None else expected
        return 0.0 if alone is None or not _largest(alone) else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    gap = _gap(expected, found)
    return 0.0 if gap == 0 else gap / size if size else float("inf")


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference. Piece by piece, since tensors may be as large as fits in memory."""
    if not one.dim() or one.numel() <= _PIECE:
        return _largest(one - other)
    rows = max(1, _PIECE * len(one) // one.numel())
    gap = 0.0
    for start in range(0, len(one), rows):
        pair = one[start : start + rows], other[start : start + rows]
        each = _gap(pair[0][0], pair[1][0]) if rows == 1 else _largest(pair[0] - pair[1])
        if not each <= gap:
            gap = each
    return gap
