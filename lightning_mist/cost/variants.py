"""What stages hold where networks are asked about at once that differ in which parameters are trained.

Array axes
    K  candidates
    V  variants
    W  networks, of which several variants may be the same
    U  ranges of regions
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import FloatArray, IntArray
from lightning_mist.cost.held import Holdings


class VariantHoldings(Holdings):
    """Parameters of stages of networks that differ in which of these are trained; keeps what it has computed.

    Args:
        network_V: Which of them each variant is.
        reduced_R: Bytes of gradients that are reduced behind the backward of each region, in all of them: where they
            stay afterwards is another question.

    Attributes:
        table: Parameters of the first network, with ``single_R`` and ``trained_R`` of every variant.
    """

    def __init__(self, each: Sequence[Holdings], network_V: IntArray, reduced_R: FloatArray) -> None:
        super().__init__(each[0].spec, each[0].table, len(each))
        self._each, self._network_V = tuple(each), network_V
        tables = [holdings.table for holdings in self._each]
        self.table = replace(
            self.table,
            single_R=np.stack([table.single_R for table in tables])[network_V],
            trained_R=np.repeat(reduced_R[None], len(network_V), axis=0),
        )

    def held_of(self, network: int, low_U: IntArray, high_U: IntArray) -> FloatArray:
        """What is held of ranges of regions of one of the networks."""
        return self._each[network].held_of(0, low_U, high_U)

    def shared_of(self, network: int, low_U: IntArray, high_U: IntArray, ranks: int) -> FloatArray:
        """What the fullest rank has of ranges of regions of one of the networks."""
        return self._each[network].shared_of(0, low_U, high_U, ranks)

    def _network(self, candidates: StageCandidates) -> IntArray:
        if candidates.variant_K is None:
            raise ValueError("candidates.variant_K = None: it says which variant of the network each is of")
        network_K: IntArray = self._network_V[candidates.variant_K]
        return network_K
