"""What the network costs that a command is for."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_mist.cli.output import say

if TYPE_CHECKING:
    from lightning_mist.model import ModelSpec


def trace_network(
    model: str,
    *,
    rows: int,
    seq_len: int | None,
    precision: str,
    optimizer: str,
    degrees: tuple[int, ...],
    device_kind: str,
) -> "ModelSpec":
    """What the network costs, split over these tensor-parallel degrees too where that can be.

    Found out in a process of its own: it runs the user's code, on tensors without values.
    """
    from lightning_mist.model.apart import run_apart

    return run_apart(
        _trace,
        model,
        rows=rows,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        degrees=degrees,
        device_kind=device_kind,
        tell=say,
    )


def _trace(
    model: str,
    *,
    rows: int,
    seq_len: int | None,
    precision: str,
    optimizer: str,
    degrees: tuple[int, ...],
    device_kind: str,
    tell: Callable[[str], None],
) -> "ModelSpec":
    import torch

    from lightning_mist.model import derive_splits, map_module, trace_model
    from lightning_mist.model.sources import open_model
    from lightning_mist.runtime.batches import batch_rows, slice_rows

    optimizer_class = getattr(torch.optim, optimizer, None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise ValueError(f"optimizer {optimizer!r} is not a class in torch.optim: write for example AdamW or SGD")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, so that the user's own modules are found
    # Where a batch grows is seen by comparing two batches, so one row is not enough.
    source = open_model(model, batch_rows=max(2, rows), sequence_length=seq_len, precision=precision)
    tell(f"tracing {source.name}")
    known = batch_rows(source.batch)
    smaller = slice_rows(source.batch, 0, known - 1) if known is not None and known > 1 else None
    found = map_module(source.module, source.call, source.batch, second_batch=smaller)
    if degrees:
        tell(f"finding out how {', '.join(map(str, degrees))} devices could share layers")
        found = derive_splits(source.module, source.call, source.batch, found, degrees)
    spec = trace_model(
        source.module,
        source.batch,
        call=source.call,
        module_map=found,
        optimizer=optimizer_class,
        precision=precision,
        device_kind=device_kind,
    )
    return replace(spec, name=source.name)
