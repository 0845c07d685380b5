"""What stages hold where networks are asked about at once that differ in which parameters are trained.

Array axes
    K  candidates
    V  variants
    W  networks, of which several variants may be the same
    P  parameters
    X  figures
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_mist.cost.candidates import StageCandidates
from lightning_mist.cost.compile import IntArray
from lightning_mist.cost.held import HeldBytes, Holdings, SharedOut


class VariantHoldings(Holdings):
    """Parameters of stages of networks that differ in which of these are trained; keeps what it has computed.

    Args:
        each: Parameters of the networks.
        network_V: Which of them each variant is.

    Attributes:
        table: Parameters of the first network, with ``single_R`` and ``trained_R`` of every variant.
    """

    def __init__(self, each: Sequence[Holdings], network_V: IntArray) -> None:
        super().__init__(each[0].spec, each[0].table)
        self._each, self._network_V = tuple(each), network_V
        tables = [holdings.table for holdings in self._each]
        self.table = replace(
            self.table,
            single_R=np.stack([table.single_R for table in tables])[network_V],
            trained_R=np.stack([table.trained_R for table in tables])[network_V],
        )

    def of(self, candidates: StageCandidates) -> HeldBytes:
        """Parameters and gradients of each candidate in its variant."""
        names, network_K = HeldBytes.__slots__, self._network(candidates)
        found_XK = np.empty((len(names), len(candidates)))
        for network, holdings in enumerate(self._each):
            at_J = np.flatnonzero(network_K == network)
            some = holdings.of(candidates.take(at_J))
            found_XK[:, at_J] = [getattr(some, name) for name in names]
        return HeldBytes(**dict(zip(names, found_XK, strict=True)))

    def shares(self, candidates: StageCandidates, ranks: int) -> SharedOut:
        """What the fullest of the data-parallel ranks of each candidate has, in its variant."""
        network_K = self._network(candidates)
        found = SharedOut(
            trained_K=np.empty(len(candidates)),
            every_K=np.empty(len(candidates)),
            forward_AK=np.empty((4, len(candidates))),
            backward_AK=np.empty((4, len(candidates))),
        )
        for network, holdings in enumerate(self._each):
            at_J = np.flatnonzero(network_K == network)
            some = holdings.shares(candidates.take(at_J), ranks)
            for name in SharedOut.__slots__:
                getattr(found, name)[..., at_J] = getattr(some, name)
        return found

    def _network(self, candidates: StageCandidates) -> IntArray:
        if candidates.variant_K is None:
            raise ValueError("candidates.variant_K = None: it says which variant of the network each is of")
        network_K: IntArray = self._network_V[candidates.variant_K]
        return network_K
