"""Modules made without memory, and their values as the user's code would have made them."""

from lightning_mist.model.initialization.construction import deferred_construction
from lightning_mist.model.initialization.initial_values import (
    InitialValues,
    OnRankZero,
    blocks_alike,
    empty_out,
    find_sources,
    load_hollow,
)
