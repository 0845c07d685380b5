"""What a closed form of a transformer's memory is about: sizes, precision, and the chain from scores to the loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_mist.estimate.closed_form.layer_bytes import CUDA, LayerForm, OperatorSet, Split, layer_form
from lightning_mist.estimate.closed_form.network_sizes import TransformerDims
from lightning_mist.model.spec import OptimizerSpec

_ITEMSIZES = {"16": 2, "bf16": 2, "32": 4, "64": 8}
"""Bytes of an element by the first part of Lightning's names of precisions."""

DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
"""Names of element types by their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBytes:
    """Bytes per score (token times vocabulary) of the chain from the last matrix to the loss, and back."""

    kept: int
    forward: int
    backward: int


LOSSES: Mapping[str, LossBytes] = {
    "same": LossBytes(kept=2, forward=4, backward=6),
    "upcast": LossBytes(kept=4, forward=8, backward=12),
    "held": LossBytes(kept=6, forward=10, backward=14),
    "shifted": LossBytes(kept=4, forward=12, backward=12),
    "autocast": LossBytes(kept=4, forward=10, backward=12),
    "autocast-cuda": LossBytes(kept=6, forward=8, backward=10),
}
"""Cross entropy, traced in eager torch 2.13: of 16-bit scores in their own type; of scores cast to 32 bits (or in 32
bits from the start); the same while the caller holds the 16-bit scores too, as Hugging Face's outputs do; of 32-bit
scores shifted by one position; under a CPU's autocast, which casts the scores; under CUDA's, which casts their
logarithms and keeps both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """What a closed form is about.

    Attributes:
        batch_rows: Rows of each rank's batch.
        loss: Name of the chain to the loss in :data:`LOSSES`; by default scores are cast to 32 bits, or what autocast
            does.

    Raises:
        ValueError: If a name is not known.
    """

    dims: TransformerDims
    optimizer: OptimizerSpec
    sequence_length: int
    batch_rows: int = 1
    precision: str = "bf16-true"
    operators: OperatorSet = CUDA
    loss: str | None = None

    def __post_init__(self) -> None:
        """Check names."""
        kind, _, how = self.precision.partition("-")
        if kind not in _ITEMSIZES or how not in ("true", "mixed") or (how == "mixed" and _ITEMSIZES[kind] != 2):
            raise ValueError(
                f"precision = {self.precision!r}: closed forms know 16-true, bf16-true, 32-true, 64-true, 16-mixed and "
                "bf16-mixed"
            )
        if self.loss is not None and self.loss not in LOSSES:
            raise ValueError(f"loss = {self.loss!r}: known chains are {', '.join(LOSSES)}")

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
    def losses(self) -> LossBytes:
        """The chain to the loss."""
        cast = "autocast-cuda" if self.operators.device == "cuda" else "autocast"
        found = LOSSES[self.loss or (cast if self.mixed else "upcast")]
        if self.itemsize < 8:
            return found
        return LossBytes(kept=2 * found.kept, forward=2 * found.forward, backward=2 * found.backward)

    def word_ranks(self, split: Split) -> int:
        """Tensor-parallel ranks that share the words of tables and scores: all of them, if they divide their number."""
        return split.degree if self.dims.vocabulary % split.degree == 0 else 1

    def form(self, split: Split, *, recomputed: bool = False) -> LayerForm:
        """What one layer keeps."""
        return layer_form(
            self.dims, self.operators, itemsize=self.itemsize, mixed=self.mixed, split=split, recomputed=recomputed
        )
