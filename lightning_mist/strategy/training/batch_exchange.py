"""Batches travel: each rank loads what plain data parallelism would give it, and computes on what the plan says.

The ranks of one pipeline replica gather their batches: first a few bytes of each, by which all know whether anybody's
batch has another structure than before (then the structures are gathered too), then the tensors, packed and padded to
the largest. Every stage needs almost every batch, and a gathering has no order to get wrong, as messages would.
Nothing is exchanged between replicas, nor where every rank computes on its own batch. Where ranks share data loaders,
those that feed the replica give their batches to all others of it, one after another.
"""

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_mist.devices import packed, unpacked
from lightning_mist.errors import PlanError
from lightning_mist.leaves import Wrapping, inner_tensors, is_plain
from lightning_mist.plan import (
    Plan,
    RowSlice,
    feeders,
    loader_of,
    loader_ranks,
    parts_of,
    replica_of,
    replica_ranks,
    row_slice,
)
from lightning_mist.runtime.communication import Microbatch, Transport, Work
from lightning_mist.tensors import batch_rows, batch_tensors, is_dense, slice_rows
from lightning_mist.tensors import leaves as leaves_of

_NUMBERS = 3 * 8
"""Bytes of what a rank says with every batch: a seed, a note, and whether the structure is another than before."""

_SEED_BITS = 62
"""Bits of a drawn seed: what ``torch.randint`` gives without touching the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """Stands for a tensor; its values follow in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class _Pickler(pickle.Pickler):
    """Takes dense tensors out of whatever it pickles, wherever they are in it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, tuple[int, Tensor]] = {}

    def persistent_id(self, node: Any) -> int | None:
        if isinstance(node, Tensor) and node.requires_grad:
            # Where it arrives it would take part in no backward, and ranks that share layers would not run the same.
            raise ValueError("a tensor that requires a gradient")
        if not isinstance(node, Tensor) or not is_plain(node) or not is_dense(node):
            return None
        return self.tensors.setdefault(id(node), (len(self.tensors), node))[0]

    def reducer_override(self, node: Any) -> Any:
        if not isinstance(node, Tensor) or is_plain(node) or not is_dense(node):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return Wrapping(node).around, (inner_tensors(node),)


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(text))
        self._tensors = tensors

    def persistent_load(self, key: int) -> Tensor:
        return self._tensors[key]


def take_apart(batch: Any, device: torch.device) -> tuple[list[Tensor], bytes]:
    """The dense tensors of a batch of any class, and what puts it together around others like them.

    Raises:
        ValueError: Why it cannot go to other processes.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(batch)
    except ValueError:
        raise
    except Exception as error:  # whatever the classes of its members make of it
        raise ValueError(f"{type(error).__name__}: {error}") from error
    tensors = [tensor for _, tensor in pickler.tensors.values()]
    if any(tensor.is_meta and device.type != "meta" for tensor in tensors):
        raise ValueError("a tensor on device meta")
    return tensors, file.getvalue()


def _drawn_seed(number: int) -> int:
    """A seed from the state of torch's generator, which is left alone, and the number of the batch."""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    digest = hashlib.blake2b(state + number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _seed_of(seed: int, piece: RowSlice) -> int:
    """Seed of a part: ranks whose generators were seeded alike draw other numbers for their batches all the same."""
    return (piece.owner << _SEED_BITS) + seed + piece.part


class BatchExchange:
    """Gives a rank its microbatches, once a batch has been exchanged.

    Attributes:
        group: The ranks of the replica, which share batches.
        owners: Those of them whose batches these are.
        whole: Whether no batch is cut.
    """

    def __init__(self, plan: Plan, rank: int, transport: Transport, device: torch.device) -> None:
        self.plan, self.rank, self.transport, self.device = plan, rank, transport, device
        replica = replica_of(plan, rank)
        self.group, self.owners = replica_ranks(plan, replica), feeders(plan)[replica]
        self._slices = {
            peer: tuple(row_slice(plan, peer, index) for index in range(plan.num_microbatches)) for peer in self.group
        }
        self.notes: tuple[int, ...] = ()
        self.whole = all(item.parts == 1 for slices in self._slices.values() for item in slices)
        self._batches_run = 0
        # Dimensions of the tensors of the first batch with so many.
        self._dimensions: dict[int, int] = {}
        self._received: dict[int, tuple[Any, Any, int]] = {}
        # What batches are made of beside tensors, by the rank that loads them, pickled.
        self._structures: dict[int, bytes] = {}

    @property
    def is_own(self) -> bool:
        """Whether this rank runs the step once for each batch of its own, and for no others."""
        return max(parts_of(self.plan)) == len(self.group) == 1

    def whole_of(self, microbatch: Microbatch) -> Any:
        """The whole batch that a part is of."""
        return self._received[microbatch.owner][0]

    def forget(self) -> None:
        """Let go of the whole batches."""
        self._received = {}

    def run(self, batch: Any, random_state: Tensor, note: int = 0) -> Iterator[Work]:
        """Exchange one batch; :attr:`microbatches` and :attr:`notes` are set when the iterator ends.

        Random generators are left as they are. Their state travels with whole batches.

        Raises:
            PlanError: If a batch cannot be cut as the plan says.
        """
        # Nothing is drawn for the parts' seeds: what user code draws between steps is what it would draw under DDP.
        self._batches_run += 1
        seed = _drawn_seed(self._batches_run) if not self.whole else 0
        if len(self.group) == 1:
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
        if rows == 0 and (piece.parts > 1 or len(self.group) > 1):
            raise PlanError(
                f"the batch of rank {piece.owner} has 0 rows, of which there are none to share out: leave empty "
                "batches out of the loader, or use a plan with one stage, tensor_parallel_degree = 1 and whole batches"
            )
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
        self._check_dimensions(batch, piece.owner)
        low, high = piece.rows(rows)
        return Microbatch(
            # A last batch may have fewer rows than parts: a part without rows is not computed at all.
            value=slice_rows(batch, low, high) if high > low else None,
            weight=(high - low) / rows,
            owner=piece.owner,
            index=index,
            batch_rows=rows,
            rows=(low, high),
            seed=_seed_of(seed, piece),
        )

    def _check_dimensions(self, batch: Any, owner: int) -> None:
        """Refuse to cut a batch whose first dimension need not be rows: tensors have lost one since the first batch."""
        dimensions = [tensor.ndim for tensor in leaves_of(batch) if isinstance(tensor, Tensor)]
        first = self._dimensions.setdefault(len(dimensions), sum(dimensions))
        if sum(dimensions) < first:
            raise PlanError(
                f"batch {self._batches_run} of rank {owner} has tensors of {dimensions} dimensions, "
                f"{first} in all before: what is left of them need not be rows, along which the plan cuts; give "
                "batches of one form, or use a plan with whole batches"
            )

    def _exchange(
        self, batch: Any, random_state: Tensor, seed: int, note: int, received: dict[int, tuple[Any, Any, int]]
    ) -> Iterator[Work]:
        try:
            tensors, skeleton = take_apart(batch, self.device)
        except ValueError as error:
            raise PlanError(
                f"the batch of rank {self.rank} cannot go to the ranks that it is shared out to ({error}): give "
                "batches of tensors with values and without a graph, numbers and text, or use a plan with one stage "
                "and tensor_parallel_degree = 1"
            ) from error
        leaves = tuple(
            _Leaf(shape=tuple(x.shape), dtype=x.dtype, is_on_host=x.device.type == "cpu" != self.device.type)
            for x in tensors
        )
        structure = pickle.dumps((skeleton, leaves))
        is_new = self.rank in self.owners and structure != self._structures.get(self.rank)
        # Of one length, whatever the batch: also the state of its generators, where that travels.
        numbers = torch.tensor([seed, note, is_new], device="cpu").view(torch.uint8)
        said = self.transport.all_gather(torch.cat([numbers, random_state]) if self.whole else numbers, self.group)
        yield said
        rows = dict(zip(self.group, said.result(), strict=True))
        notices = {rank: row[:_NUMBERS].clone().view(torch.int64).tolist() for rank, row in rows.items()}
        self.notes = tuple(noted for _, noted, _ in notices.values())
        if any(is_other for *_, is_other in notices.values()):
            told = self.transport.all_gather_object(structure if is_new else None, self.group)
            found = zip(self.group, told, strict=True)
            self._structures |= {owner: text for owner, text in found if text is not None}
        structures = {owner: pickle.loads(self._structures[owner]) for owner in self.owners}
        values: dict[int, list[list[Tensor]]] = {owner: [] for owner in self.owners}
        for is_on_host in (False, True):
            mine = [tensor for tensor, leaf in zip(tensors, leaves, strict=True) if leaf.is_on_host == is_on_host]
            theirs = {
                owner: [leaf for leaf in found if leaf.is_on_host == is_on_host]
                for owner, (_, found) in structures.items()
            }
            yield from self._gather(mine, theirs, torch.device("cpu") if is_on_host else self.device, values)
        for owner in {item.owner for item in self._slices[self.rank]}:
            skeleton, leaves = structures[owner]
            value = batch
            if owner != self.rank:
                parts = [iter(part) for part in values[owner]]
                value = _Unpickler(skeleton, [next(parts[leaf.is_on_host]) for leaf in leaves]).load()
            received[owner] = (value, rows[owner][_NUMBERS:].clone(), notices[owner][0])

    def _gather(
        self,
        tensors: Sequence[Tensor],
        leaves: Mapping[int, Sequence[_Leaf]],
        device: torch.device,
        values: dict[int, list[list[Tensor]]],
    ) -> Iterator[Work]:
        """Gather the tensors in one place, and append those of each rank whose batch is computed on here."""
        wanted = {item.owner for item in self._slices[self.rank]} - {self.rank}
        nbytes = max(sum(leaf.nbytes for leaf in each) for each in leaves.values())
        buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8, device=device)] * len(self.owners)
        if nbytes and self.owners == self.group:
            gathered = self.transport.all_gather(packed(tensors, device, nbytes), self.group)
            yield gathered
            buffers = list(gathered.result())
        elif nbytes:
            empty = torch.empty(nbytes, dtype=torch.uint8, device=device)
            buffers = [
                packed(tensors, device, nbytes) if owner == self.rank else empty.clone() for owner in self.owners
            ]
            for owner, buffer in zip(self.owners, buffers, strict=True):
                yield self.transport.broadcast(buffer, owner, self.group)
        for owner, buffer in zip(self.owners, buffers, strict=True):
            kinds = [(leaf.shape, leaf.dtype) for leaf in leaves[owner]]
            values[owner].append(unpacked(buffer, kinds) if owner in wanted else [])


# Whether ranks that share a data loader have loaded the same samples.


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
    """Refuse to go on where ranks that share one of so many loaders have loaded different samples, by their digests.

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

    Raises:
        PlanError: If they have loaded different samples.
    """
    if plan.data_parallel_size is None:
        return own
    ranks = loader_ranks(plan, loader_of(plan, transport.rank))
    found = transport.all_gather_object((digest, own), ranks)
    check_same_samples([of_rank for of_rank, _ in found], ranks, plan.num_loaders)
    return [item for _, items in found for item in items]
