"""One rank on its way through its schedule: what it allocates and frees at every action.

As in the runtime outputs are kept until they have been sent, inputs until their gradients have, and what is sent until
the schedule tells that it has arrived.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from lightning_mist.estimate.replay.gradient_events import Gradients
from lightning_mist.estimate.replay.rank_state import CrossingTensor, ReplayedRank
from lightning_mist.model.events import EventTape, Label, PartRun, StageTemplate, WeightGradient
from lightning_mist.plan.mesh import itemsize
from lightning_mist.schedule import Action, ActionKind
from lightning_mist.schedule.action import HEAD, INPUT_BACKWARDS, TAIL

_Key = tuple[int, int]
"""Stage and microbatch."""

SMALLEST_BYTES = 1024
"""What is smaller is not moved, as in the runtime."""


class BatchWalk:
    """Walks through the actions of one batch.

    Args:
        arrivals: Which sends each computation finds arrived.
        between: Does what happens to gradients, parameters and the optimizer's state of units.
    """

    def __init__(
        self,
        tape: EventTape,
        view: ReplayedRank,
        templates: Mapping[int, StageTemplate],
        arrivals: Mapping[Action, Sequence[Action]],
        gradients: Gradients,
        between: Callable[[Action], None],
    ) -> None:
        self._tape, self._view, self._templates = tape, view, templates
        self._arrivals, self._gradients, self._between = arrivals, gradients, between
        self._last = view.plan.num_stages - 1
        self._parts_of: dict[tuple[int, int | None], tuple[int, ...]] = {}
        self._bases: dict[_Key, int] = {}
        self._incoming: dict[_Key, list[list[int]]] = {}
        self._received: dict[_Key, list[int]] = {}
        self._striped: dict[_Key, list[int]] = {}
        self._outgoing: dict[_Key, list[int | None]] = {}
        self._arriving: dict[_Key, list[list[int]]] = {}
        self._returned: dict[_Key, list[int | None]] = {}
        self._sends: dict[Action, list[int]] = {}
        self._waiting: dict[_Key, list[tuple[WeightGradient, frozenset[int]]]] = {}
        self._kept_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._moved: dict[tuple[_Key, int], list[tuple[int, int]]] = {}
        self.kept: list[int] = []

    def perform(self, action: Action, lines: Sequence[Action]) -> None:
        """One action of a microbatch."""
        assert action.microbatch is not None
        key = action.stage, action.microbatch
        inner, behind = list(lines), list[Action]()
        while inner and inner[0].microbatch is None:
            self._between(inner.pop(0))
        while inner and inner[-1].microbatch is None:
            behind.insert(0, inner.pop())
        if action.kind is ActionKind.FORWARD:
            self._forward(action, key, inner)
        elif action.kind in INPUT_BACKWARDS:
            self._backward(action, key, inner)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            self._weights(key)
        elif action.kind is ActionKind.RECV_ACTIVATION:
            entering = self._view.crossing(key[0], key[0] - 1, key[1])
            self._incoming[key] = [self._buffers(tensor, "received activation", key) for tensor in entering]
        elif action.kind is ActionKind.RECV_GRADIENT:
            self._receive_gradients(key)
        elif action.kind is ActionKind.SEND_ACTIVATION:
            self._send_activation(action, key)
        elif action.kind is ActionKind.SEND_GRADIENT:
            self._send_gradient(action, key)
        for line in behind:
            self._between(line)

    def finish(self) -> None:
        """The batch is over: everything that was sent has arrived."""
        for identities in self._sends.values():
            self._free(identities)
        self._sends.clear()

    # Transfers -------------------------------------------------------------------------------------------------------

    def _buffers(self, tensor: CrossingTensor, what: str, key: _Key) -> list[int]:
        label = Label("transfer_bytes", what, dtype=tensor.dtype)
        return [self._tape.malloc(size, label, *key) for size in tensor.portions]

    def _laid_anew(self, key: _Key) -> list[CrossingTensor]:
        """What arrived as a run of tokens of which context-parallel ranks compute on stripes."""
        crossing = self._view.crossing(key[0], key[0] - 1, key[1]) if key[0] else ()
        return [tensor for tensor in crossing if tensor.times_laid]

    def _laid(self, tensor: CrossingTensor, key: _Key) -> int:
        """Stripes in place of a run, or the other way round: all ranks' parts, the whole made of them, the part."""
        label, whole = (
            Label("transfer_bytes", "tokens laid out anew", dtype=tensor.dtype),
            tensor.times_laid * tensor.bytes,
        )
        stacked, joined = (self._tape.malloc(whole, label, *key) for _ in range(2))
        self._tape.free(stacked)
        part = self._tape.malloc(tensor.bytes, label, *key)
        self._tape.free(joined)
        return part

    def _join(self, portions: Sequence[list[int]], tensors: Sequence[CrossingTensor], key: _Key) -> list[int]:
        """Whole tensors from what was received; a single portion is the tensor."""
        label, joined = Label("transfer_bytes", "received, put together"), []
        for parts, tensor in zip(portions, tensors, strict=True):
            joined.append(parts[0] if len(parts) == 1 else self._tape.malloc(tensor.bytes, label, *key))
            self._free(parts if len(parts) > 1 else ())
        return joined

    def _receive_gradients(self, key: _Key) -> None:
        """Room for gradients; what comes as a whole lies where backward will look for it."""
        tensors = [t for t in self._view.crossing(key[0], key[0] + 1, key[1]) if t.requires_grad]
        portions = []
        for tensor, slot in zip(tensors, self._templates[key[0]].arriving, strict=True):
            if len(tensor.shares) == 1:
                self._tape.allocate(self._bases[key] + slot)
            portions.append(self._buffers(tensor, "received gradient", key) if len(tensor.shares) > 1 else [])
        self._arriving[key] = portions

    def _join_gradients(self, key: _Key, base: int) -> None:
        """Put together what came in portions."""
        portions = self._arriving.pop(key, [])
        for parts, slot in zip(portions, self._templates[key[0]].arriving, strict=True):
            if parts:
                self._tape.allocate(base + slot)
                self._free(parts)

    def _send_activation(self, action: Action, key: _Key) -> None:
        tensors = self._view.crossing(key[0], key[0] + 1, key[1])
        sent = zip(tensors, self._outgoing.pop(key), strict=True)
        self._sends[action] = [held for item in sent for held in self._posted(*item, key)]

    def _send_gradient(self, action: Action, key: _Key) -> None:
        tensors = [t for t in self._view.crossing(key[0], key[0] - 1, key[1]) if t.requires_grad]
        held: list[int] = []
        for tensor, identity in zip(tensors, self._returned.pop(key), strict=True):
            label = Label("transfer_bytes", "gradient of zeros to be sent", dtype=tensor.dtype)
            sent = self._tape.malloc(tensor.bytes, label, *key) if identity is None else identity
            held += self._posted(tensor, sent, key)
        self._sends[action] = held
        self._free(self._received.pop(key))

    def _posted(self, tensor: CrossingTensor, identity: int | None, key: _Key) -> list[int]:
        """What lives until a tensor has arrived: itself, or copies of its parts."""
        if not tensor.is_copied:
            return [] if identity is None else [identity]
        copies = self._buffers(tensor, "part to be sent", key)
        if identity is not None:
            self._tape.free(identity)
        return copies

    def _release(self, action: Action) -> None:
        for send in self._arrivals.get(action, ()):
            self._free(self._sends.pop(send, []))

    def _free(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._tape.free(identity)

    # Computation -----------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, key: _Key, lines: Sequence[Action]) -> None:
        stage, template = key[0], self._templates[key[0]]
        portions = self._incoming.pop(key, [])
        if stage > 0:
            joined = self._join(portions, self._view.crossing(stage, stage - 1, key[1]), key)
            self._received[key] = joined
            self._striped[key] = [self._laid(tensor, key) for tensor in self._laid_anew(key)]
            self._release(action)
        base = self._bases[key] = self._tape.reserve(template.slots, *key)
        if 0 in template.forward and 0 not in template.parts:
            self._tape.play(template.forward[0].events_E, base)
        for line in self._computed(lines):
            for part in self._parts(template, line):
                self._tape.play(template.forward[part].events_E, base)
        self._free([base + slot for slot in template.left])
        self.kept += [base + slot for slot in template.kept]
        if stage < self._last:
            self._outgoing[key] = [None if slot is None else base + slot for slot in template.outputs]

    def _backward(self, action: Action, key: _Key, lines: Sequence[Action]) -> None:
        stage, template, base = key[0], self._templates[key[0]], self._bases[key]
        is_split = action.kind is ActionKind.BACKWARD_INPUT
        if stage < self._last:
            self._release(action)
            self._join_gradients(key, base)
        way = self._gradients.begins(stage)
        runs = template.inputs[way] if is_split else template.backward[way]
        for line in self._computed(lines):
            for part in reversed(self._parts(template, line)):
                self._play(runs[part], base, stage, part, way=way)
        self._free([base + slot for slot in template.ended[way]])
        for tensor in self._laid_anew(key):
            if tensor.requires_grad:
                self._tape.free(self._laid(tensor, key))
        self._free(self._striped.pop(key, ()))
        if is_split:
            self._put_off(key, base, template.weights[way])
        if stage > 0:
            self._returned[key] = [None if slot is None else base + slot for slot in template.returned[way]]
        del self._bases[key]

    def _computed(self, lines: Sequence[Action]) -> Iterator[Action]:
        """The lines that compute, in between what happens to gradients, parameters and activations of units."""
        for line in lines:
            if line.microbatch is None:
                self._between(line)
            elif line.kind in (ActionKind.DROP_ACTIVATIONS, ActionKind.LOAD_ACTIVATIONS):
                move = self._drop if line.kind is ActionKind.DROP_ACTIVATIONS else self._load
                move((line.stage, line.microbatch), self._parts(self._templates[line.stage], line)[-1])
            elif line.kind is not ActionKind.STORE_ACTIVATIONS:
                self._gradients.arrived((line.stage, line.unit))
                yield line

    def _drop(self, key: _Key, part: int) -> None:
        """What a layer has moved leaves: of each tensor what stays is copied, and the whole is freed."""
        moved = self._moved[key, part] = []
        for slot, rest in self._kept(key[0], part):
            label = Label("activation_bytes", "what stays of what was moved")
            stays = self._tape.malloc(rest, label, *key) if rest else -1
            self._tape.free(self._bases[key] + slot)
            moved.append((self._bases[key] + slot, stays))

    def _load(self, key: _Key, part: int) -> None:
        """Room for what comes back."""
        for identity, stays in self._moved.pop((key, part)):
            self._tape.allocate(identity)
            self._free([stays] if stays >= 0 else ())

    def _kept(self, stage: int, part: int) -> list[tuple[int, int]]:
        """Slots of what a layer keeps until its backward that is moved, each with the bytes that stay, by their size.

        That is what its backward frees of all that forwards make: of neighbours that keep a tensor the later one's.
        """
        if (stage, part) not in self._kept_of:
            template, ratio = self._templates[stage], self._view.plan.stages[stage].kept_ratio(part - 1)
            made = {event for run in template.forward.values() for event in run.events_E.tolist()}
            gone = {*template.left, *template.outputs, *template.kept}
            found = self._kept_of[stage, part] = []
            for event in template.backward[True][part].events_E.tolist():
                slot, size = -event - 1, int(template.slots.bytes_K[-event - 1])
                if -event not in made or event in made or slot in gone or size < SMALLEST_BYTES:
                    continue
                unit = itemsize(template.slots.labels[slot].dtype or "uint8")
                rest = (size // unit - round(ratio * (size // unit))) * unit
                if rest < size:
                    found.append((slot, rest))
            found.sort(key=lambda item: int(template.slots.bytes_K[item[0]]))
        return self._kept_of[stage, part]

    def _put_off(self, key: _Key, base: int, weights: Sequence[WeightGradient]) -> None:
        """What gradients of weights will be made of waits for them."""
        received = self._received.get(key, []) if any(item.received for item in weights) else []
        if received:
            self._received[key] = []
        products = []
        for item in weights:
            operands = {base + slot for slot in item.operands}
            operands.update(received if item.received else ())
            products.append((item, frozenset(operands)))
        self._waiting[key] = products

    def _weights(self, key: _Key) -> None:
        """The gradients of weights that waited."""
        products = self._waiting.pop(key)
        users = Counter(identity for _, operands in products for identity in operands)
        for item, operands in products:
            self._gradients.make(item, key)
            for identity in sorted(operands):
                users[identity] -= 1
                if not users[identity]:
                    self._tape.free(identity)
            self._gradients.made(item.name)

    def deferred(self, key: _Key) -> frozenset[str]:
        """The weights of a microbatch whose gradients wait."""
        return frozenset(item.name for item, _ in self._waiting.get(key, ()))

    def _play(self, run: PartRun, base: int, stage: int, part: int, *, way: bool) -> None:
        """A part's backward, stopping wherever a gradient is accumulated that something hangs on."""
        start = 0
        for made in run.made:
            identity = base + made.slot
            if not self._gradients.is_watched(made.name, stage):
                if way:
                    self._gradients.found[made.name] = identity
                continue
            self._tape.play(run.events_E[start : made.event], base)
            start = made.event
            self._gradients.accumulate(made.name, identity, stage, part, way=way)
        self._tape.play(run.events_E[start:], base)

    def _parts(self, template: StageTemplate, line: Action) -> tuple[int, ...]:
        """The regions that one line computes, in the order of forward."""
        key = line.stage, line.unit
        if key not in self._parts_of:
            self._parts_of[key] = self._find_parts(template, line)
        return self._parts_of[key]

    def _find_parts(self, template: StageTemplate, line: Action) -> tuple[int, ...]:
        units = self._view.expanded[line.stage].order if line.stage in self._view.expanded else ()
        if line.unit is None or len(units) < 2:
            return template.parts
        regions = [self._region(unit) for unit in units]
        at = regions.index(self._region(line.unit))
        low = regions[at] if at else template.parts[0]
        high = regions[at + 1] if at + 1 < len(regions) else template.parts[-1] + 1
        return tuple(part for part in template.parts if low <= part < high)

    def _region(self, unit: int) -> int:
        return {HEAD: 0, TAIL: self._view.spec.num_layers + 1}.get(unit, unit + 1)
