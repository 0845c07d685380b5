"""What layers keep for backward, in host memory until then.

Autograd hands over every tensor that it saves. Their storages are offloaded, each once however many tensors view it:
the last ``ratio`` of the elements of each; views are made anew when autograd asks for them. Copies begin and end where
the schedule says, never where autograd asks: see :mod:`lightning_mist.schedule.stage_program`.

Not offloaded is what others hold anyway: parameters, their casts to a lower precision, buffers, the batch, small
tensors, and small views into large storages. What a recomputed layer keeps are its arguments, and these are offloaded
by the ratio of such layers; inside, the recomputation's own hooks are asked, not these.

A tensor that several layers keep arrives for the one that backward reaches first.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_mist.errors import TraceError
from lightning_mist.plan import OFFLOAD_KINDS, UPDATED_KINDS
from lightning_mist.runtime.host_memory import CopyStreams, HostPool, padded_bytes, views_into
from lightning_mist.schedule import Action, ActionKind

SMALLEST_BYTES = 1024
"""Smaller storages stay: a copy takes longer than they are worth (torchtune moves none of less either)."""

LEAST_COVERED = 4
"""A storage of which less than one of so many parts was saved stays: a third is what queries are of a fused projection
whose keys and values are gathered elsewhere."""

_Key = tuple[int, int, int]
"""Stage, microbatch and unit."""


class _Kept:
    """A storage that autograd has saved tensors of.

    Attributes:
        whole: All its bytes, while they are on the device.
        home: The others in host memory.
        left: The end of their copy.
        key: The last unit that saved of it, for whose backward it must be there.
        covered: Bytes of the tensors that were saved of it.
    """

    __slots__ = (
        *("__weakref__", "covered", "home", "key", "left", "nbytes", "rest", "storage", "unit_bytes", "versions"),
        "whole",
    )

    def __init__(self, tensor: Tensor, key: _Key) -> None:
        storage = tensor.untyped_storage()
        self.whole: Tensor | None = _bytes_of(storage)
        self.storage = weakref.ref(storage)
        self.nbytes, self.unit_bytes = storage.nbytes(), tensor.element_size()
        self.versions = [(tensor.detach(), tensor._version)]
        self.rest: Tensor | None = None
        self.home: Tensor | None = None
        self.left: Any = None
        self.key, self.covered = key, 0

    def is_unchanged(self) -> bool:
        """Whether nobody wrote into it since it was saved, as far as that is known."""
        return all(tensor._version == version for tensor, version in self.versions)

    def check(self) -> None:
        """See that nobody wrote into what was saved: with hooks autograd does not look itself."""
        for tensor, version in self.versions:
            _check_version(tensor, version)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor as autograd keeps it: a view into what is kept."""

    kept: _Kept
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Staying:
    """A tensor that stays, and its version."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _Offloaded:
    """What a unit moves of a microbatch."""

    kept: list["weakref.ref[_Kept]"] = field(default_factory=list)
    block: Tensor | None = None


class OffloadedActivations:
    """What a rank's layers keep for backward, of which some is in host memory.

    Args:
        ratios: The share of every storage's elements that is offloaded, by stage and unit.
        held: The module's parameters and buffers.
    """

    def __init__(
        self, ratios: Mapping[tuple[int, int], float], held: Sequence[Tensor], streams: CopyStreams, pool: HostPool
    ) -> None:
        self._ratios, self._held, self._streams, self._pool = ratios, held, streams, pool
        self._ops = streams.ops
        self._now: _Key | None = None
        self._never: set[int] = set()
        self._casts: set[tuple[torch.Size, torch.dtype]] = set()
        self._known: dict[tuple[int, int], weakref.ref[_Kept]] = {}
        self._offloaded: defaultdict[_Key, _Offloaded] = defaultdict(_Offloaded)
        self._arriving: dict[_Key, list[weakref.ref[_Kept]]] = {}
        self._loaded: dict[_Key, Any] = {}
        self._free: defaultdict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._do: dict[ActionKind, Callable[[_Key], None]] = {
            ActionKind.STORE_ACTIVATIONS: self._store,
            ActionKind.DROP_ACTIVATIONS: self._drop,
            ActionKind.LOAD_ACTIVATIONS: self._load,
        }

    def hooks(self, held: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Around a forward: autograd hands over what it saves; what is ``held`` by others stays."""
        self._now = None
        held = [tensor for tensor in (*self._held, *held) if tensor.layout is torch.strided]
        self._never = {tensor.untyped_storage()._cdata for tensor in held}
        self._casts = self._forms_of_casts()
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        return hooks

    def reach(self, action: Action, *, moves: bool) -> None:
        """A unit computes: what is saved in its forward is its own, and what its backward needs is waited for.

        Args:
            moves: Whether it is a forward of which something will be offloaded.
        """
        assert action.microbatch is not None
        assert action.unit is not None
        key = action.stage, action.microbatch, action.unit
        self._now = key if moves else None
        if action.kind is not ActionKind.FORWARD:
            self._streams.wait(self._loaded.pop(key, None))

    def perform(self, action: Action) -> None:
        """Begin, or end, the copies of one unit."""
        assert action.microbatch is not None
        assert action.unit is not None
        self._do[action.kind]((action.stage, action.microbatch, action.unit))

    def forget(self) -> None:
        """A batch has ended: what no backward has asked for is gone with its graph."""
        for event in self._loaded.values():
            self._streams.wait(event)  # An error came before its backward: the copy writes where others will.
        for key, offloaded in self._offloaded.items():
            self._give_back(key, offloaded)
        self._offloaded.clear()
        self._known.clear()
        self._arriving.clear()
        self._loaded.clear()
        self._now = None

    # What autograd asks ----------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        if self._now is None or not self._is_movable(tensor):
            return _Staying(tensor, tensor._version)
        kept = self._kept(tensor, self._now)
        kept.covered += tensor.numel() * tensor.element_size()
        return _Saved(kept, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Staying):
            _check_version(saved.tensor, saved.version)
            return saved.tensor
        kept = saved.kept
        if kept.whole is None:
            raise TraceError(
                "what a layer keeps for backward is in host memory when a backward asks for it: the step may not run "
                "a backward of its own (torch.autograd.grad or Tensor.backward) through layers of which any is; use "
                f"{' and '.join(f'offload.{kind} = 0' for kind in OFFLOAD_KINDS if kind not in UPDATED_KINDS)}"
            )
        kept.check()
        view = torch.empty(0, dtype=saved.dtype, device=kept.whole.device)
        return view.set_(kept.whole.untyped_storage(), saved.offset, saved.shape, saved.stride)

    def _is_movable(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._ops.device:
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or storage._cdata in self._never:
            return False
        return (tensor.shape, tensor.dtype) not in self._casts

    def _kept(self, tensor: Tensor, now: _Key) -> _Kept:
        storage = tensor.untyped_storage()
        place = now[1], storage._cdata
        known = self._known.get(place)
        kept = None if known is None else known()
        if kept is None or kept.storage() is not storage or not kept.is_unchanged():
            kept = _Kept(tensor, now)
            self._known[place] = weakref.ref(kept)
            self._offloaded[now].kept.append(weakref.ref(kept))
            return kept
        if kept.whole is None:
            # It has left for an earlier unit, and is here all the same: somebody else holds it.
            kept.whole, kept.rest = _bytes_of(storage), None
        if kept.key != now:
            kept.key = now
            self._offloaded[now].kept.append(weakref.ref(kept))
        kept.versions.append((tensor.detach(), tensor._version))
        return kept

    def _forms_of_casts(self) -> set[tuple[torch.Size, torch.dtype]]:
        """What weights look like where autocast has cast them, whole or transposed.

        A cast is the weight's and not the layer's work, and one may be there for the whole batch.
        """
        kind = self._ops.device.type
        if not torch.is_autocast_enabled(kind):
            return set()
        dtype = torch.get_autocast_dtype(kind)
        shapes = {p.shape for p in self._held if p.is_floating_point() and p.dtype != dtype}
        return {(form, dtype) for shape in shapes for form in (shape, shape[::-1])}

    # What the schedule says ------------------------------------------------------------------------------------------

    def _store(self, key: _Key) -> None:
        offloaded = self._offloaded[key]
        alive = [kept for reference in offloaded.kept if (kept := reference()) is not None]
        ratio = self._ratios[key[0], key[2]]
        moving = [(kept, tail) for kept in alive if (tail := self._tail(kept, ratio)) is not None]
        if not moving:
            return
        tails = [tail for _, tail in moving]
        offloaded.block = block = self._block(key, padded_bytes(tails))
        homes = views_into(block, tails)
        event = self._streams.store(homes, tails)
        for (kept, _), home in zip(moving, homes, strict=True):
            kept.home, kept.left = home, event

    def _drop(self, key: _Key) -> None:
        alive = [kept for reference in self._offloaded[key].kept if (kept := reference()) is not None]
        # The largest last: what stays of it is copied where the others were.
        for kept in sorted(alive, key=lambda kept: kept.nbytes):
            # What a later unit saved too stays for that one.
            if kept.home is None or kept.whole is None or kept.key != key:
                continue
            kept.check()
            kept.versions.clear()
            self._streams.wait(kept.left)
            kept.left = None
            first = kept.nbytes - kept.home.numel()
            kept.rest = kept.whole[:first].clone() if first else None
            kept.whole = None
            self._arriving.setdefault(key, []).append(weakref.ref(kept))

    def _load(self, key: _Key) -> None:
        targets, sources = [], []
        for reference in self._arriving.pop(key, ()):
            kept = reference()
            # What a later unit saved too has arrived for that one.
            if kept is None or kept.whole is not None or kept.home is None:
                continue
            whole = torch.empty(kept.nbytes, dtype=torch.uint8, device=self._ops.device)
            first = kept.nbytes - kept.home.numel()
            if kept.rest is not None:
                whole[:first].copy_(kept.rest)
                kept.rest = None
            targets.append(whole[first:])
            sources.append(kept.home)
            kept.whole, kept.home = whole, None
        if targets:
            self._loaded[key] = self._streams.load(targets, sources, after=[self._ops.record()])
        offloaded = self._offloaded.pop(key, None)
        if offloaded is not None:
            self._give_back(key, offloaded)

    def _tail(self, kept: _Kept, ratio: float) -> Tensor | None:
        """The part of a storage that is offloaded; none of one of which little was saved, or that has left already."""
        if kept.whole is None or kept.home is not None or LEAST_COVERED * kept.covered < kept.nbytes:
            return None
        elements = kept.nbytes // kept.unit_bytes
        first = (elements - round(ratio * elements)) * kept.unit_bytes
        return kept.whole[first:] if first < kept.nbytes else None

    def _block(self, key: _Key, nbytes: int) -> Tensor:
        """A free block of this unit's, or a new one where none is as large: microbatches may differ."""
        blocks = self._free[key[0], key[2]]
        for index, block in enumerate(blocks):
            if len(block) >= nbytes:
                return blocks.pop(index)
        if blocks:
            self._pool.give(blocks.pop())
        return self._pool.take_bytes(nbytes)

    def _give_back(self, key: _Key, offloaded: _Offloaded) -> None:
        # Nothing is written there before the backward that waits for what is read from there now.
        if offloaded.block is not None:
            self._free[key[0], key[2]].append(offloaded.block)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _check_version(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise TraceError(
            f"a tensor of shape {tuple(tensor.shape)} that is needed for backward was changed in place: it has "
            f"version {tensor._version}, and had {version} when it was saved, which autograd itself refuses"
        )
