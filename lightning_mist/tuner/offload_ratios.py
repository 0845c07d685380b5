"""Combinations of shares of state that may be in host memory.

Array axes
    B  candidates that are tried with offload
    C  combinations of ratios, nothing moved first
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from lightning_mist.cost.compile import BoolArray, FloatArray, IntArray
from lightning_mist.cost.offload_parts import Ratios as KindRatios
from lightning_mist.tuner.search_space import OFFLOADED, SearchSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Every combination of what may be moved.

    Attributes:
        sizes: How many ratios each kind of state may have.
        offload_CO: The combinations, the ratios of the last kind running fastest.
        each: The ratios of each kind of state.
        values: All ratios that occur, ascending.
        key: What tells them from others.
    """

    sizes: tuple[int, ...]
    offload_CO: FloatArray
    each: KindRatios
    values: tuple[float, ...]
    key: Hashable

    @classmethod
    def of(cls, search: SearchSpace, offered: Sequence[float]) -> "Ratios":
        """Those of a search space.

        Args:
            search: Says which kinds of state may be moved.
            offered: The ratios; 0 is always among them.
        """
        ratios = tuple(sorted({0.0, *map(float, offered)}))
        each = {name: ratios if name in search.offloaded else (0.0,) for name in OFFLOADED}
        return cls(
            sizes=tuple(map(len, each.values())),
            offload_CO=np.array(list(product(*each.values())), dtype=np.float64),
            each=KindRatios(**each),
            values=ratios if search.offloaded else (0.0,),
            key=tuple(each.items()),
        )

    def __len__(self) -> int:
        """Number of combinations, nothing moved among them."""
        return len(self.offload_CO)

    @property
    def pairs(self) -> int:
        """Number of pairs of ratios of activations and of gradients."""
        return self.sizes[OFFLOADED.index("gradients")] * self.sizes[OFFLOADED.index("activations")]

    def least(self, fits_BC: BoolArray, ordered: Sequence[str]) -> BoolArray:
        """Of the combinations that fit, those that move no more than they have to.

        Args:
            fits_BC: Which combinations fit.
            ordered: Kinds of state of which a larger ratio is never faster.
        """
        defers_C = self.offload_CO[:, : OFFLOADED.index("activations")].max(axis=1) > 0
        moves_C = self.offload_CO.max(axis=1) > 0
        # Candidates last: what is done to a combination is done to those of all candidates, which lie together.
        fits_CB = np.ascontiguousarray(fits_BC.T)
        found_CB = np.zeros_like(fits_CB)
        for family_C in (moves_C & ~defers_C, defers_C):
            found_CB |= self._minimal(fits_CB & family_C[:, None], ordered)
        return np.ascontiguousarray(found_CB.T)

    def _minimal(self, fits_CB: BoolArray, ordered: Sequence[str]) -> BoolArray:
        above, kept = (fits_CB.reshape(*self.sizes, -1).copy() for _ in range(2))
        fronts = [(slice(None),) * OFFLOADED.index(name) for name in ordered]
        for front in fronts:
            at = [(*front, ratio) for ratio in range(self.sizes[len(front)])]
            for before, behind in pairwise(at):
                above[behind] |= above[before]
        for front in fronts:
            # One that is beaten along an axis has something that fits at or below its neighbour there.
            behind, before = (*front, slice(1, None)), (*front, slice(None, -1))
            kept[behind] &= ~above[before]
        found_CB: BoolArray = kept.reshape(fits_CB.shape)
        return found_CB

    def of_kinds(self, combination_J: IntArray) -> IntArray:
        """Which ratio of each kind of state combinations have; axes ``J`` and ``O``."""
        found_JO: IntArray = np.stack(np.unravel_index(combination_J, self.sizes), axis=1)
        return found_JO
