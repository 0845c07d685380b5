"""Which plan: the search for the fastest one that fits."""

from lightning_mist.tuner.baselines import Baseline, baselines
from lightning_mist.tuner.space import SearchSpace
from lightning_mist.tuner.tune import Alternative, TuneResult, TuneStats, tune

__all__ = ["Alternative", "Baseline", "SearchSpace", "TuneResult", "TuneStats", "baselines", "tune"]
