"""Which plan: the search for the fastest one that fits.

What a program that only names a strategy has no use for is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mist.plan import SearchSpace as SearchSpace

if TYPE_CHECKING:
    from lightning_mist.tuner.planner import Planner, tune, unshared
    from lightning_mist.tuner.select import Alternative, TuneResult, TuneStats
    from lightning_mist.tuner.space import degrees_to_try


_HOMES = {
    "planner": ("Planner", "tune", "unshared"),
    "select": ("Alternative", "TuneResult", "TuneStats"),
    "space": ("degrees_to_try",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
