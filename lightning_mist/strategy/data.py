"""Batches travel: each rank loads what plain data parallelism would give it, and computes on what the plan says.

The ranks of one pipeline replica tell each other the structure of their batches (a small object gather), then every
owner sends its batch, packed into one message, to each peer that computes on a part of it. Nothing is exchanged between
replicas, nor where every rank computes on its own batch.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import PlanError
from lightning_mist.plan import Plan, RowSlice, replica_of, replica_ranks, row_slice
from lightning_mist.runtime.batches import batch_rows, rebuild, slice_rows
from lightning_mist.runtime.executor import Microbatch
from lightning_mist.runtime.transport import Transport, Work

_BATCH_TAG = 1 << 20
"""Tag of batch messages; the executor's own tags are small."""

_SEED_BITS = 62
"""Bits of a drawn seed: what ``torch.randint`` gives without touching the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """Stands for a tensor; its values follow in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What a rank says of its batch before the tensors travel."""

    skeleton: Any
    leaves: tuple[_Leaf, ...]
    random_state: Any
    seed: int
    note: int


def _take_apart(batch: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a batch, and the batch with a :class:`_Leaf` in place of each.

    Mappings, lists, tuples and dataclasses are looked into, whatever their class.
    """
    tensors: list[Tensor] = []

    def replace(node: Any) -> Any:
        if not isinstance(node, Tensor):
            return None
        tensors.append(node)
        return _Leaf(shape=tuple(node.shape), dtype=node.dtype)

    return tensors, rebuild(batch, replace)


def _put_together(skeleton: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """The batch again; what came with the skeleton and knows how to move (a graph, say) moves to this device."""
    left = iter(tensors)

    def replace(node: Any) -> Any:
        if isinstance(node, _Leaf):
            return next(left)
        is_container = isinstance(node, (Mapping, list, tuple)) or is_dataclass(node)
        return node.to(device) if not is_container and callable(getattr(node, "to", None)) else None

    return rebuild(skeleton, replace)


def _pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _leaf_bytes(leaf: _Leaf) -> int:
    return leaf.dtype.itemsize * prod(leaf.shape)


def _unpack(buffer: Tensor, leaves: Sequence[_Leaf]) -> list[Tensor]:
    values, start = [], 0
    for leaf in leaves:
        size = _leaf_bytes(leaf)
        # A clone starts at an aligned address, which a view into the message need not.
        values.append(buffer[start : start + size].clone().view(leaf.dtype).reshape(leaf.shape))
        start += size
    return values


def _drawn_seed(number: int) -> int:
    """A seed from the state of torch's generator, which is left alone, and the number of the batch."""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    digest = hashlib.blake2b(state + number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _seed_of(seed: int, piece: RowSlice) -> int:
    """Seed of a part: ranks whose generators were seeded alike draw other numbers for their batches all the same."""
    return (piece.owner << _SEED_BITS) + seed + piece.part


class BatchExchange:
    """Gives a rank its microbatches.

    Args:
        plan: The plan.
        rank: This global rank.
        transport: Carries headers and rows inside the replica.
        device: Where batches live.

    Attributes:
        owners: The ranks whose batches these ranks share.
        whole: Whether no batch is cut.
        microbatches: What this rank computes on, once a batch has been exchanged.
        notes: What the ranks that share batches told each other beside them.
    """

    def __init__(self, plan: Plan, rank: int, transport: Transport, device: torch.device) -> None:
        self.plan, self.rank, self.transport, self.device = plan, rank, transport, device
        self.owners = replica_ranks(plan, replica_of(plan, rank))
        self._slices = {
            peer: tuple(row_slice(plan, peer, index) for index in range(plan.num_microbatches)) for peer in self.owners
        }
        self.notes: tuple[int, ...] = ()
        self.whole = all(item.parts == 1 for slices in self._slices.values() for item in slices)
        self._batches_run = 0
        self._received: dict[int, tuple[Any, Any, int]] = {}

    def whole_of(self, microbatch: Microbatch) -> Any:
        """The whole batch that a part is of."""
        return self._received[microbatch.owner][0]

    def share_of(self, microbatch: Microbatch) -> tuple[float, float]:
        """Where a part begins and ends in its whole batch, as shares of the rows."""
        piece, rows = self._slices[self.rank][microbatch.index], microbatch.batch_rows
        assert rows is not None
        low, high = piece.rows(rows)
        return low / rows, high / rows

    def is_last(self, microbatch: Microbatch) -> bool:
        """Whether a part is the last of its batch that this rank computes."""
        return not any(
            later.owner == microbatch.owner and later.weight for later in self.microbatches[microbatch.index + 1 :]
        )

    def forget(self) -> None:
        """Let go of the whole batches."""
        self._received = {}

    def run(self, batch: Any, random_state: Any, note: int = 0) -> Iterator[Work]:
        """Exchange one batch; :attr:`microbatches` and :attr:`notes` are set when the iterator ends.

        Random generators are left as they are.

        Args:
            batch: The batch that this rank loaded.
            random_state: State of this rank's generators, to travel with whole batches.
            note: A number to tell the ranks that share batches with this one.

        Raises:
            PlanError: If a batch cannot be cut as the plan says.
        """
        # Nothing is drawn for the parts' seeds: what user code draws between steps is what it would draw under DDP.
        self._batches_run += 1
        seed = _drawn_seed(self._batches_run) if not self.whole else 0
        if len(self.owners) == 1:
            received: dict[int, tuple[Any, Any, int]] = {self.rank: (batch, random_state, seed)}
            self.notes = (note,)
        else:
            received = {}
            yield from self._exchange(batch, random_state, seed, note, received)
        self._received = received
        self.microbatches = tuple(self._microbatch(index, received) for index in range(self.plan.num_microbatches))

    def _microbatch(self, index: int, received: dict[int, tuple[Any, Any, int]]) -> Microbatch:
        piece = self._slices[self.rank][index]
        batch, random_state, seed = received[piece.owner]
        rows = batch_rows(batch)
        if piece.parts == 1:
            # Whole batches pass through untouched, whatever they are made of.
            return Microbatch(
                value=batch,
                weight=1.0,
                owner=piece.owner,
                index=index,
                batch_rows=rows,
                # States travel only if every stage sees whole batches: parts of one batch cannot all go on from one.
                random_state=random_state if self.whole else None,
                seed=None if self.whole else _seed_of(seed, piece),
            )
        if rows is None:
            raise PlanError(
                f"the batch of rank {piece.owner} cannot be cut (its tensors differ in their first dimension), but the "
                f"plan cuts it into {piece.parts} parts: use a plan with num_microbatches = "
                f"{self.plan.num_microbatches // piece.parts}"
            )
        low, high = piece.rows(rows)
        return Microbatch(
            # A last batch may have fewer rows than parts: a part without rows is not computed at all.
            value=slice_rows(batch, low, high) if high > low else None,
            weight=(high - low) / rows,
            owner=piece.owner,
            index=index,
            batch_rows=rows,
            seed=_seed_of(seed, piece),
        )

    def _exchange(
        self, batch: Any, random_state: Any, seed: int, note: int, received: dict[int, tuple[Any, Any, int]]
    ) -> Iterator[Work]:
        tensors, skeleton = _take_apart(batch)
        header = _Header(
            skeleton=skeleton,
            leaves=tuple(_Leaf(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in tensors),
            random_state=random_state,
            seed=seed,
            note=note,
        )
        gathered = self.transport.all_gather_object(header, self.owners)
        yield gathered
        headers = dict(zip(self.owners, gathered.result(), strict=True))
        self.notes = tuple(headers[owner].note for owner in self.owners)
        mine = {item.owner for item in self._slices[self.rank]}
        pending: list[Work] = []
        if any(self.rank in {item.owner for item in self._slices[peer]} for peer in self.owners if peer != self.rank):
            message = _pack(tensors, self.device)
            for peer in self.owners:
                if peer != self.rank and self.rank in {item.owner for item in self._slices[peer]} and message.numel():
                    pending.append(self.transport.isend(message, peer, _BATCH_TAG))
        buffers = {}
        for owner in sorted(mine - {self.rank}):
            size = sum(map(_leaf_bytes, headers[owner].leaves))
            buffers[owner] = torch.empty(size, dtype=torch.uint8, device=self.device)
            if size:
                yield self.transport.irecv(buffers[owner], owner, _BATCH_TAG)
        for owner in mine:
            head: _Header = headers[owner]
            value = batch
            if owner != self.rank:
                value = _put_together(head.skeleton, _unpack(buffers[owner], head.leaves), self.device)
            received[owner] = (value, head.random_state, head.seed)
        yield from pending
