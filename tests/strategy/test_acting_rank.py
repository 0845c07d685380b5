from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_mist.strategy.acting_rank import ActingRank


class Base:
    global_rank, local_rank, node_rank, num_processes = 1, 1, 0, 2

    @property
    def root_device(self):
        return f"cuda:{self.local_rank}"


class Strategy(ActingRank, Base):
    pass


def ranks(strategy):
    return strategy.global_rank, strategy.local_rank, strategy.node_rank


def test_a_strategy_speaks_for_the_owner_of_rows(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    strategy = Strategy()
    assert ranks(strategy) == (1, 1, 0)
    strategy.act_for(2)
    assert ranks(strategy) == (2, 0, 1)
    assert rank_zero_only.rank == 2
    # It computes where it computes.
    assert strategy.root_device == "cuda:1"
    assert strategy.local_rank == 0
    strategy.act_for(None)
    assert ranks(strategy) == (1, 1, 0)
    assert rank_zero_only.rank == 1
