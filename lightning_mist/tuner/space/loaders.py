"""From how many data loaders the batches of a plan come."""

from collections.abc import Sequence

from lightning_mist.errors import PlanError
from lightning_mist.plan.search_space import SearchSpace


def settled_loaders(search: SearchSpace, world_size: int, rows: int, uncut: Sequence[str]) -> int | None:
    """How many batches are loaded at once; None if as many as a plan has copies.

    Args:
        rows: Rows of a batch over all devices.
        uncut: Why batches may not be cut.

    Raises:
        PlanError: If a batch does not come in equal parts from the loaders.
    """
    asked = search.data_parallel_size
    if asked is not None and world_size % asked:
        raise PlanError(
            f"data_parallel_size = {asked} on {world_size} devices: equal groups of devices load the same samples, so "
            f"it must divide {world_size}"
        )
    if rows < 1 or (asked is not None and rows % asked):
        loaders = asked or 1
        raise PlanError(
            f"global_batch_size = {rows} with data_parallel_size = {loaders}: all loaders bring as many rows, so it "
            f"must be a multiple of {loaders}; use {max(1, round(rows / loaders)) * loaders}"
        )
    if asked is not None or rows % world_size == 0:
        return asked or world_size
    if uncut:
        raise PlanError(
            f"global_batch_size = {rows} on {world_size} devices: batches may not be cut ({'; '.join(uncut)}), so that "
            f"every device needs its own; use {max(1, round(rows / world_size)) * world_size} rows, or give "
            "data_parallel_size"
        )
    return None
