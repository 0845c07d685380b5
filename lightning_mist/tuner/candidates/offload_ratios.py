"""Combinations of the shares of state that candidates may offload.

Array axes
    B  candidates that are tried with offload
    C  combinations of ratios, nothing offloaded first
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

import numpy as np

from lightning_mist.cost.inputs import BoolArray, FloatArray
from lightning_mist.cost.memory import Ratios
from lightning_mist.plan import OFFLOADED, SearchSpace

_Place: TypeAlias = tuple[slice | int, ...]
"""Combinations with one ratio of one kind of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioGrid:
    """Every combination of what may be offloaded.

    Attributes:
        offload_CO: The combinations, the ratios of the last kind running fastest.
        each: The ratios of each kind of state.
        values: All ratios that occur, ascending.
    """

    offload_CO: FloatArray
    each: Ratios
    values: tuple[float, ...]

    @classmethod
    def of(cls, search: SearchSpace, offered: Sequence[float]) -> "RatioGrid":
        """The combinations of a search space.

        Args:
            search: Says which kinds of state may be offloaded.
            offered: The ratios; 0 is always among them.
        """
        ratios = tuple(sorted({0.0, *map(float, offered)}))
        each = {name: ratios if name in search.offloaded else (0.0,) for name in OFFLOADED}
        return cls(
            offload_CO=np.array(list(product(*each.values())), dtype=np.float64),
            each=Ratios(**each),
            values=ratios if search.offloaded else (0.0,),
        )

    def __len__(self) -> int:
        """Number of combinations, nothing offloaded among them."""
        return len(self.offload_CO)

    def minimal(self, fits_BC: BoolArray, ordered: Sequence[str]) -> BoolArray:
        """Of the combinations that fit, those that offload something and no more than they have to.

        Args:
            ordered: Kinds of state of which a larger ratio is never faster.
        """
        defers_C = self.offload_CO[:, : OFFLOADED.index("activations")].max(axis=1) > 0
        offloads_C = self.offload_CO.max(axis=1) > 0
        # Candidates last: what is done to a combination is done to those of all candidates, which lie together.
        fits_CB = np.ascontiguousarray(fits_BC.T)
        found_CB = np.zeros_like(fits_CB)
        for family_C in (offloads_C & ~defers_C, defers_C):
            found_CB |= self._minimal(fits_CB & family_C[:, None], ordered)
        return np.ascontiguousarray(found_CB.T)

    def _minimal(self, fits_CB: BoolArray, ordered: Sequence[str]) -> BoolArray:
        above, kept = (fits_CB.reshape(*self.each.shape, -1).copy() for _ in range(2))
        steps = [self._steps(name, name in ordered) for name in OFFLOADED]
        for before, behind in (step for some in steps for step in some):
            above[behind] |= above[before]
        for before, behind in (step for some in steps for step in some):
            # One that is dominated along an axis has something that fits at or below its neighbour there.
            kept[behind] &= ~above[before]
        found_CB: BoolArray = kept.reshape(fits_CB.shape)
        return found_CB

    def _steps(self, kind: str, is_ordered: bool) -> list[tuple[_Place, _Place]]:
        """Pairs of places along the ratios of a kind of state, of which the second takes at least as long."""
        front: _Place = (slice(None),) * OFFLOADED.index(kind)
        at: list[_Place] = [(*front, ratio) for ratio in range(len(getattr(self.each, kind)))]
        # Nothing takes less than offloading nothing.
        return list(pairwise(at)) if is_ordered else [(at[0], behind) for behind in at[1:]]
