"""Which rank user code sees while ranks run steps for one another."""

import sys

import torch

from lightning_mist.attributes import replaced


class ActingRank:
    """Mixed into a strategy: the ranks that user code sees are those of the owner of the rows that it works on.

    Under plain data parallelism a step runs where its batch was loaded. Ranks that share batches run it for one
    another, so while they do, what Lightning says of the rank is said of the batch's owner.
    """

    _acting_rank: int | None = None

    @property
    def global_rank(self) -> int:
        """This rank, or whose rows the step sees."""
        return _super(self, "global_rank") if self._acting_rank is None else self._acting_rank

    @property
    def local_rank(self) -> int:
        """This rank within its node, or that of the owner of the rows that the step sees."""
        own = _super(self, "local_rank")
        return own if self._acting_rank is None else self._acting_rank % self._per_node()

    @property
    def node_rank(self) -> int:
        """This rank's node, or that of the owner of the rows that the step sees."""
        own = _super(self, "node_rank")
        return own if self._acting_rank is None else self._acting_rank // self._per_node()

    @property
    def root_device(self) -> torch.device:
        """Where this process computes, whosever rows the step sees: Lightning takes it by the local rank."""
        with replaced(self, _acting_rank=None):
            return super().root_device  # type: ignore[misc, no-any-return]

    def _per_node(self) -> int:
        return max(1, int(getattr(self, "num_processes", 1)))

    def act_for(self, rank: int | None) -> None:
        """Speak for another rank from now on; ``None`` for this one again."""
        before, self._acting_rank = self._acting_rank, rank
        told = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
        if told is not None and before != rank:
            told.rank = self.global_rank


def _super(strategy: ActingRank, name: str) -> int:
    return int(getattr(super(ActingRank, strategy), name))
