"""Which plan: the search for the fastest one that fits."""

from lightning_mist.tuner.space import SearchSpace
from lightning_mist.tuner.tune import Alternative, TuneResult, TuneStats, tune

__all__ = ["Alternative", "SearchSpace", "TuneResult", "TuneStats", "tune"]
