"""Gradients on one rank, from where they are made to where they are freed; parameters that are there for a while."""

from collections.abc import Collection

from lightning_mist.cost.memory import BUCKETS_IN_FLIGHT
from lightning_mist.estimate.replay.rank_state import FlatBuffer, Held, ReplayedRank, UnitKey, padded
from lightning_mist.model.events import EventTape, Label, WeightGradient
from lightning_mist.plan.mesh import sums_wholes
from lightning_mist.schedule import Action, ActionKind


class Gradients:
    """The gradients of one rank's parameters, and the parameters that are there for a while.

    Args:
        in_buckets: Whether gradients are added to buckets that exist all the time, as torch's
            ``DistributedDataParallel`` has them.

    Attributes:
        found: The allocation of each gradient that exists by itself.
    """

    def __init__(self, tape: EventTape, view: ReplayedRank, *, in_buckets: bool) -> None:
        self._tape, self._view, self._in_buckets = tape, view, in_buckets
        self._factor = view.spec.optimizer.gradient_bytes_per_parameter_byte
        self._shard_index = view.mesh.shard_index
        self.found: dict[str, int] = {}
        self._flats: dict[int, set[str]] = {}
        self._waiting: dict[str, list[int]] = {}
        self._final: frozenset[str] = frozenset()
        self._ready: set[str] = set()
        self._launched: list[tuple[FlatBuffer, int, int]] = []
        self._under_way: list[tuple[UnitKey, FlatBuffer, int, int]] = []
        self._sums: dict[tuple[UnitKey | None, FlatBuffer], int] = {}
        self._users: dict[FlatBuffer, int] = {}
        self._there: dict[FlatBuffer, int] = {}
        self._leaving: list[FlatBuffer] = []
        self._left = view.moved["gradients"]
        self._given: dict[tuple[int, int | None], list[int]] = {}
        self._sent: dict[UnitKey, list[int]] = {}
        self._alone = -1
        owners = view.spec.module_map.owners(view.plan.bounds)
        self.names = {
            stage: frozenset(item.name for item in view.held if stage in owners[item.name]) for stage in view.chunks
        }

    # Backward --------------------------------------------------------------------------------------------------------

    def expect(self, names: Collection[str]) -> None:
        """From now on gradients of these parameters are final when they are accumulated."""
        self._final = frozenset(names) if self._buckets_leave else frozenset()

    def complete(self, names: Collection[str]) -> None:
        """These parameters get no more gradients in this batch."""
        if self._buckets_leave and names:
            self._ready.update(names)
            self._launch_ready()

    @property
    def _buckets_leave(self) -> bool:
        return self._view.shares and not (self._view.reduces_units or self._in_buckets or self._left)

    def begins(self, stage: int) -> bool:
        """Whether the backward of a stage that begins now makes the gradients of its parameters."""
        here = self.names[stage]
        is_there = any(name in here and not self._is_shared(name) for name in self.found)
        return not self._in_buckets and not (is_there and here.isdisjoint(self._left))

    def _is_shared(self, name: str) -> bool:
        """Whether several stages of this rank use a parameter."""
        return sum(name in names for names in self.names.values()) > 1

    def is_watched(self, name: str, stage: int) -> bool:
        """Whether something hangs on when a parameter's gradient is accumulated."""
        return (
            self._factor > 1
            or name in self._final
            or (name in self.found and bool(self._left))
            or self._is_shared(name)
            or len(self._view.regions_of[name][stage]) > 1
        )

    def accumulate(self, name: str, identity: int, stage: int, part: int, *, way: bool) -> None:
        """A gradient is there and is added to the parameter's, or becomes it.

        Args:
            way: Whether this backward makes gradients; in others the events themselves free what was added.
        """
        regions = self._view.regions_of[name][stage]
        if len(regions) > 1:
            if part != regions[0]:
                self._waiting.setdefault(name, []).append(identity)
                return
            identity = self._summed(name, [*self._waiting.pop(name, []), identity])
        if self._factor > 1:
            self._add_up(name, identity)
        elif name not in self.found and not self._in_buckets:
            self.found[name] = identity
        elif way or len(regions) > 1:
            self._tape.free(identity)
        self._note_final(name)

    def _add_up(self, name: str, identity: int) -> None:
        """A gradient is cast to the type of the sum, and becomes it or is added to it."""
        size = round(self._factor * self._view.by_name[name].bytes)
        total = self._tape.malloc(size, Label("gradient_bytes", f"gradient of {name}, added up"))
        self._tape.free(identity)
        if name in self.found:
            self._tape.free(total)
        else:
            self.found[name] = total

    def _note_final(self, name: str) -> None:
        if name in self._final:
            self._ready.add(name)
            self._launch_ready()

    def make(self, item: WeightGradient, key: tuple[int, int]) -> None:
        """The gradient of a weight is made by itself, for a stage and a microbatch, and cast to the weight's type."""
        label = Label("gradient_bytes", f"gradient of {item.name}", operator="aten.mm.default")
        self._alone = made = self._tape.malloc(item.made_bytes, label, *key)
        if item.made_bytes != item.nbytes:
            self._alone = self._tape.malloc(item.nbytes, label, *key)
            self._tape.free(made)

    def made(self, name: str) -> None:
        """It is added to the weight's gradient, or becomes it."""
        if self._factor > 1:
            self._add_up(name, self._alone)
        elif name in self.found:
            self._tape.free(self._alone)
        else:
            self.found[name] = self._alone
        self._note_final(name)

    def _summed(self, name: str, identities: list[int]) -> int:
        """Autograd sums what several regions say of one parameter before it accumulates."""
        total = identities[0]
        for other in identities[1:]:
            label = Label("gradient_bytes", f"gradient of {name}, summed")
            result = self._tape.malloc(self._view.by_name[name].bytes, label)
            self._tape.free(total)
            self._tape.free(other)
            total = result
        return total

    # Buckets ---------------------------------------------------------------------------------------------------------

    def _launch_ready(self) -> None:
        buckets = self._view.buckets
        while len(self._launched) < len(buckets) and self._ready.issuperset(buckets[len(self._launched)].names):
            self._launch(buckets[len(self._launched)])

    def _launch(self, bucket: FlatBuffer) -> None:
        self._launched.append((bucket, *self._take(bucket, "bucket of gradients")))

    def _take(self, flat: FlatBuffer, what: str) -> tuple[int, int]:
        """Copy gradients into a flat buffer; they are gone afterwards. Its sum, or this rank's piece of it, stays."""
        identity = self._tape.malloc(flat.with_counts, Label("gradient_bytes", what))
        for name in flat.names:
            gradient = self.found.pop(name, None)
            if gradient is not None:
                self._tape.free(gradient)
        if not flat.piece:
            return identity, identity
        return identity, self._tape.malloc(flat.piece, Label("gradient_bytes", "this rank's piece of gradients"))

    def reduce(self) -> None:
        """Over the data-parallel ranks: afterwards gradients lie in flat buffers."""
        if not self._view.shares or self._in_buckets:
            return
        if self._view.reduces_units:
            self._finish_units()
            return
        for bucket in self._view.dealt(self._left)[len(self._launched) :]:
            self._launch(bucket)
        for bucket, identity, mine in self._launched:
            if bucket.owner in (None, self._shard_index):
                self._keep(bucket, mine)
            if mine != identity or bucket.owner not in (None, self._shard_index):
                self._tape.free(identity)
        self._launched.clear()
        self._ready.clear()

    def _keep(self, flat: FlatBuffer, identity: int) -> None:
        if self._factor > 1 and not self._view.reduces_units:
            identity = self._widened(flat, identity)
        self._flats[identity] = set(flat.names)

    def _widened(self, flat: FlatBuffer, identity: int) -> int:
        """What has arrived, in the type of sums."""
        label = Label("gradient_bytes", "gradients that have arrived, added up")
        total = self._tape.malloc(round(self._factor * (flat.piece or flat.with_counts)), label)
        self._tape.free(identity)
        return total

    def reduce_tied(self) -> None:
        """Over the groups of devices that hold the same parameter."""
        label = Label("gradient_bytes", "gradient of a tied parameter, on its way")
        lent = [item for item in self._view.several if item.name in self._left & self._view.owned]
        self.found.update((item.name, self._tape.malloc(item.bytes, label)) for item in lent)
        for item, identity in [(item, self._contribution(item, label)) for item in self._view.tied]:
            self._install(item, identity)
        factor = round(self._factor)
        spread = [(item, self._tape.malloc(factor * (item.bytes + item.itemsize), label)) for item in self._view.spread]
        for item, identity in spread:
            self._install(item, identity)
        for item in lent:
            self.drop(item.name)

    def _contribution(self, item: Held, label: Label) -> int:
        factor = round(self._factor)
        flat = self._tape.malloc(factor * (item.bytes + item.itemsize), label)
        if not sums_wholes(self._view.plan, item.item) or item.bytes == item.whole_bytes:
            return flat
        degree = self._view.plan.stages[self._view.mesh.stage].mesh.tensor_parallel_degree
        gathered = [self._tape.malloc(factor * degree * (item.bytes + item.itemsize), label) for _ in range(2)]
        whole = self._tape.malloc(factor * item.whole_bytes, label)
        total = self._tape.malloc(factor * (item.whole_bytes + item.itemsize), label)
        for identity in (*gathered, whole, flat):
            self._tape.free(identity)
        return total

    def _install(self, item: Held, identity: int) -> None:
        if item.bytes != item.whole_bytes and sums_wholes(self._view.plan, item.item):
            part = self._tape.malloc(
                round(self._factor) * item.bytes, Label("gradient_bytes", f"gradient of {item.name}")
            )
            self._tape.free(identity)
            identity = part
        self.drop(item.name)
        self.found[item.name] = identity

    def drop(self, name: str) -> None:
        """A parameter lets go of its gradient; a flat buffer goes with the last that lies in it."""
        if name in self.found:
            self._tape.free(self.found.pop(name))
        for identity, names in [(i, names) for i, names in self._flats.items() if name in names]:
            names.remove(name)
            if not names:
                self._tape.free(identity)
                del self._flats[identity]

    @property
    def room(self) -> int:
        """The most bytes that the gradients in host memory of one unit take in a buffer."""
        view, rooms = self._view, [0]
        for flats in view.unit_gradients.values() if self._left else ():
            kept = [flat for flat in flats if flat.leaves and (self._is_mine(flat) or not view.reduces_units)]
            whole = [flat.with_counts if view.shares else flat.bytes for flat in kept]
            mine = (flat.piece * view.reduces_units or size for flat, size in zip(kept, whole, strict=True))
            rooms.append(sum(padded(round(self._factor * size)) for size in mine))
        return max(rooms)

    def _is_mine(self, flat: FlatBuffer) -> bool:
        """Whether this rank updates what is in a flat buffer, or a piece of it."""
        return flat.piece > 0 or flat.owner == self._shard_index

    # Units -----------------------------------------------------------------------------------------------------------

    def line(self, line: Action) -> None:
        """What happens between the units of a computation."""
        assert line.unit is not None
        key = line.stage, line.unit
        if line.kind in (ActionKind.STORE_GRADIENTS, ActionKind.REDUCE_GRADIENTS) and not self._view.reduces_units:
            self._add_in_buffer(key, is_sent=line.kind is ActionKind.REDUCE_GRADIENTS)
        elif line.kind is ActionKind.STORE_GRADIENTS:
            if any(unit == key and flat.leaves and self._is_mine(flat) for unit, flat, *_ in self._under_way):
                self._settle()
        elif line.kind is ActionKind.REDUCE_GRADIENTS:
            self._settle()
            for flat in self._view.unit_gradients[key]:
                self._under_way.append((key, flat, *self._take(flat, "gradients of a unit on their way")))
        elif line.kind is ActionKind.UNSHARD:
            self._unshard(key)
        elif line.kind is ActionKind.RESHARD:
            self._reshard(key)
        elif line.kind is ActionKind.GATHER_PARAMETERS:
            self._given[key] = [self._give_out(flat) for flat in self._view.flats_of(self._view.updated[key])]
        elif line.kind is ActionKind.LOAD_PARAMETERS:
            for flat in self._updated(key):
                self._fetch(flat)
        elif line.kind is ActionKind.STORE_PARAMETERS:
            self.arrived(key)
            self.rest()
            self._leaving = self._updated(key)

    def _add_in_buffer(self, key: UnitKey, *, is_sent: bool) -> None:
        """Gradients of a unit are added to sums in a buffer, which travel, or have arrived, beside it."""
        flats = [flat for flat in self._view.unit_gradients[key] if flat.leaves]
        for name in (name for flat in flats for name in flat.names):
            self.drop(name)
        for identity in self._sent.pop(key, ()):
            self._tape.free(identity)
        if is_sent:
            label = Label("gradient_bytes", "gradients of a unit on their way")
            casts = [flat.with_counts for flat in flats if self._factor > 1]
            pieces = [flat.piece for flat in flats if flat.piece]
            self._sent[key] = [self._tape.malloc(size, label) for size in (*casts, *pieces)]

    def _updated(self, key: UnitKey) -> list[FlatBuffer]:
        """What of this rank's own in host memory is updated with a unit."""
        names = {item.name for item in self._view.updated[key]}
        flats = self._view.shards_of.get(key, ())
        return [flat for flat in flats if flat.leaves and self._is_mine(flat) and flat.names[0] in names]

    def rest(self) -> None:
        """What was written back is freed, unless a unit uses it."""
        for flat in self._leaving:
            if not self._users.get(flat) and flat in self._there:
                self._tape.free(self._there.pop(flat))
        self._leaving = []

    def _unshard(self, key: UnitKey) -> None:
        for flat in self._view.shards_of.get(key, ()):
            self._users[flat] = self._users.get(flat, 0) + 1
            if flat.leaves or flat.owner != self._shard_index:
                self._fetch(flat)

    def _fetch(self, flat: FlatBuffer) -> None:
        if flat not in self._there:
            whose = "this rank, fetched" if flat.owner == self._shard_index else "other ranks, unsharded"
            self._there[flat] = self._tape.malloc(flat.bytes, Label("parameter_bytes", f"parameters of {whose}"))

    def _reshard(self, key: UnitKey) -> None:
        for flat in self._view.shards_of.get(key, ()):
            self._users[flat] -= 1
            if not self._users[flat] and flat in self._there:
                self._tape.free(self._there.pop(flat))

    def _settle(self) -> None:
        """What is under way has arrived: owners, or all, add up what is theirs and let go of the rest."""
        for key, flat, identity, mine in self._under_way:
            # Chunks that use the same parameters add to one piece.
            place = None if flat.piece else key
            if self._is_mine(flat) and not flat.leaves and (place, flat) not in self._sums:
                self._sums[place, flat] = self._widened(flat, mine) if self._factor > 1 else mine
            else:
                self._tape.free(mine)
            if mine != identity:
                self._tape.free(identity)
        self._under_way.clear()

    def _finish_units(self) -> None:
        self._settle()
        for (_, flat), identity in self._sums.items():
            known = {name for names in self._flats.values() for name in names}
            if known.issuperset(flat.names):
                self._tape.free(identity)
            else:
                self._keep(flat, identity)
        self._sums.clear()

    # Update ----------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Give out what the optimizer updated: two flat buffers under way at once."""
        under_way: list[int] = []
        for bucket in self._view.buckets:
            under_way.append(self._give_out(bucket))
            if len(under_way) == BUCKETS_IN_FLIGHT:
                self._tape.free(under_way.pop(0))
        for identity in under_way:
            self._tape.free(identity)

    def _give_out(self, flat: FlatBuffer) -> int:
        label = Label("transfer_bytes", "updated parameters")
        identity = self._tape.malloc(flat.bytes, label)
        if flat.piece and self._factor == 1:
            # This rank's piece is put together from whole parameters.
            self._tape.free(self._tape.malloc(flat.piece, label))
        return identity

    def arrived(self, key: tuple[int, int | None]) -> None:
        """What a unit was given of its updated parameters has been taken over."""
        for identity in self._given.pop(key, ()):
            self._tape.free(identity)

    def forget(self) -> None:
        """All gradients are gone: the next step begins."""
        for identity in (*self.found.values(), *self._flats):
            self._tape.free(identity)
        self.found.clear()
        self._flats.clear()
