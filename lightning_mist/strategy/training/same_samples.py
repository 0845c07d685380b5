"""Whether ranks that share a data loader have loaded the same samples."""

import hashlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, loader_of, loader_ranks
from lightning_mist.runtime.communication import Transport, told
from lightning_mist.tensors import batch_tensors

T = TypeVar("T")

_ENTRIES = 1 << 16
"""Of a tensor that tell one batch from another."""


def digest_of(batch: Any) -> str | None:
    """Equal for equal batches; None if there are no values to compare, or none that can be read.

    Of large tensors it looks at values that are spread over all of them.
    """
    found, count = hashlib.blake2b(digest_size=16), 0
    try:
        for tensor in filter(torch.Tensor.numel, batch_tensors(batch)):
            values = tensor.detach().reshape(-1)
            part = values[:: -(-len(values) // _ENTRIES)].cpu().contiguous()
            found.update(repr((tuple(tensor.shape), tensor.dtype)).encode() + part.view(torch.uint8).numpy().tobytes())
            count += 1
    except Exception:  # of any kind of tensor: where it matters, that there is no digest is compared too
        return None
    return found.hexdigest() if count else None


def check_same_samples(digests: Sequence[str | None], ranks: Sequence[int], loaders: int) -> None:
    """Refuse to go on where ranks that share a loader have loaded different samples, or it cannot be told.

    Args:
        digests: Of the batch of each of the ranks.
        loaders: Number of loaders.

    Raises:
        PlanError: If they are not all alike.
    """
    share = f"data_parallel_size = {loaders}: ranks {ranks[0]} to {ranks[-1]} share a data loader"
    if digests[0] is None:
        raise PlanError(
            f"{share}, and their batches hold no tensors by which it could be told that they load the same samples; "
            "leave data_parallel_size out"
        )
    other = next((rank for rank, digest in zip(ranks, digests, strict=True) if digest != digests[0]), None)
    if other is not None:
        raise PlanError(
            f"{share}, and rank {other} has loaded other samples than rank {ranks[0]}, of which only one rank's would "
            "be trained. Let Lightning make the DistributedSampler, or make it with "
            "trainer.distributed_sampler_kwargs; draw augmentations alike on these ranks (seed_everything without "
            "workers=True); or leave data_parallel_size out"
        )


def of_loader(own: list[T], digest: str | None, plan: Plan, transport: Transport) -> list[T]:
    """What all ranks that share this one's data loader have of a batch; one of them has fed it, and has its results.

    Args:
        own: What this rank has.
        digest: Of the batch as this rank has loaded it.

    Raises:
        PlanError: If they have loaded different samples.
    """
    if plan.data_parallel_size is None:
        return own
    ranks = loader_ranks(plan, loader_of(plan, transport.rank))
    found = told(transport, (digest, own), ranks)
    check_same_samples([of_rank for of_rank, _ in found], ranks, plan.num_loaders)
    return [item for _, items in found for item in items]
