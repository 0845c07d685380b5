"""What a network costs, as data: one specification per kind of layer, expressions in microbatch rows and length.

Bytes are attributed to the part of the step that allocates them: every storage counts once, for the head, the layer or
the tail in whose forward it was made. All expressions are exact polynomials (or ``Max`` of such) in
:data:`~lightning_mist.model.spec.polynomial.MICROBATCH` and :data:`~lightning_mist.model.spec.polynomial.SEQUENCE`.
"""

from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, NamedTuple, TypeVar

import sympy

from lightning_mist.errors import PlanError
from lightning_mist.model.spec.allocation_events import LayerEvents, PartEvents, StepPoint
from lightning_mist.model.spec.polynomial import MICROBATCH, SEQUENCE, Polynomial
from lightning_mist.plan import ModuleMap, StageMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """What the optimizer keeps and needs.

    Attributes:
        state_bytes_per_parameter_byte: Bytes of state kept per byte of a trained parameter (AdamW in fp32: 2).
        step_peak_bytes_per_parameter_byte: Temporary bytes of its step per byte of all parameters it updates at once
            (the foreach implementations).
        step_peak_bytes_per_largest: Temporary bytes of its step per byte of the largest parameter (loop
            implementations), when those of a parameter as large are left.
        step_left_bytes_per_parameter_byte: Of the temporaries of a loop those that are left until the next parameter's
            have been made, per byte of the parameter that left them.
        step_seconds_per_parameter_byte: Seconds of one step per byte of parameters, measured; 0 if it was not.
        gradient_bytes_per_parameter_byte: Bytes of a gradient, as gradients are added up, per byte of its parameter:
            2 for gradients in 32 bits of parameters in 16 (master weights).
        narrow_state: Type of 8 bits in which it keeps state; empty if it keeps none.
        is_entrywise: Whether it is known to treat every entry by itself, so that it can update a part at a time.
    """

    name: str
    state_bytes_per_parameter_byte: float
    step_peak_bytes_per_parameter_byte: float
    step_peak_bytes_per_largest: float
    step_moved_bytes_per_parameter_byte: float
    step_left_bytes_per_parameter_byte: float = 0.0
    step_seconds_per_parameter_byte: float = 0.0
    gradient_bytes_per_parameter_byte: float = 1.0
    narrow_state: str = ""
    is_entrywise: bool = False


OperatorKind = Literal[
    "matmul", "attention", "causal_attention", "convolution", "elementwise", "reduction", "index", "copy"
]
"""Kinds of operators.

* ``matmul``: matrix products, batched ones too.
* ``attention``: fused attention, which never writes scores; ``causal_attention`` skips those behind the diagonal,
  though torch's formulas count them as FLOPs.
* ``convolution``: convolutions.
* ``reduction``: what passes over rows to reduce them, and may write them again: norms, softmax, losses, sums, pooling.
* ``index``: look-ups by numbers, and their gradients: embeddings, gathering, scattering.
* ``copy``: copies, casts, concatenations, and filling.
* ``elementwise``: all others.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor with a symbolic shape.

    Attributes:
        dtype: Name of the element type, for example ``"float32"``.
    """

    shape: tuple[sympy.Expr, ...]
    dtype: str
    itemsize: int
    requires_grad: bool

    @property
    def bytes(self) -> sympy.Expr:
        """Size in bytes, as an expression."""
        return sympy.Mul(sympy.Integer(self.itemsize), *self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter: qualified name, element count, bytes, and whether it is trained."""

    name: str
    numel: int
    bytes: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpec:
    """What tensor-parallel ranks exchange in one direction of one part.

    Attributes:
        operation: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        bytes: Bytes of the whole tensors, over all calls.
    """

    operation: str
    calls: int
    bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """What some operators of one kind do in one direction of one part.

    Matrix products and convolutions of one size have an entry of their own, as how fast they are depends on their size;
    of any other kind there is one entry.

    Attributes:
        flops: Floating-point operations of all of them together (a multiply-add is two).
    """

    kind: OperatorKind
    flops: sympy.Expr
    moved_bytes: sympy.Expr
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveSpec:
    """What a part costs where layers are recomputed by operator: products, convolutions and attention are kept.

    Attributes:
        saved_bytes: As :attr:`LayerSpec.checkpointed_saved_bytes`.
        forward_peak_bytes: As :attr:`LayerSpec.forward_peak_bytes`; more where products return what nobody needs.
        backward_peak_bytes, first_backward_peak_bytes: As :attr:`LayerSpec.recompute_backward_peak_bytes` and
            :attr:`LayerSpec.first_recompute_backward_peak_bytes`.
        work: What its repeated operators do.
        events: Its events in a first backward and in a later one; ``None`` where they are not known one by one.
    """

    saved_bytes: sympy.Expr
    forward_peak_bytes: sympy.Expr
    backward_peak_bytes: sympy.Expr
    first_backward_peak_bytes: sympy.Expr
    work: tuple[OperatorCost, ...]
    events: tuple[PartEvents, PartEvents] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One kind of layer (or the head, or the tail).

    Part of a layer is what runs between it and the next one. The peaks are *increments over saved bytes*, so that peaks
    of parts add up without knowing what the neighbours left behind: with ``saved(i)`` the saved bytes of part ``i``
    (head, layers, tail, in execution order), the bytes alive in the forward of part ``k`` of a lone microbatch are at
    most ``sum(saved(i) for i < k) + forward_peak(k)``, those in its backward at most
    ``sum(saved(i) for i <= k) + backward_peak(k)``, each time beside parameters, the batch, and gradients that exist
    already. What one part hands to the next (the activation that enters, the gradient that comes back) is thereby
    counted: do not add it again. What a *stage* keeps longer than plain execution does (an output kept until its
    gradient arrives) is not.

    A parameter that two parts use (tied weights) is treated as if each part had its own. Where both parts lie on one
    stage, autograd holds one more gradient of it from the backward of the later part to that of the earlier one if its
    gradient exists already.

    Attributes:
        kind: ``"head"``, ``"tail"``, or a label of the block kind such as ``"GPT2Block"`` (unique in the model).
        example: Qualified name of the block that was traced; empty for head and tail.
        forward_work, backward_work: What its operators that compute or copy do, by kind (views cost nothing).
        saved_bytes: Bytes allocated in its forward and still alive when the forward of the whole step has ended.
        checkpointed_saved_bytes: The same if the layer is recomputed in backward; it is what it hands on.
        forward_peak_bytes: Largest number of bytes alive during its forward beyond the saved bytes of all parts before
            it. Its own saved bytes are included.
        backward_peak_bytes: Largest number of bytes alive during its backward beyond the saved bytes of all parts
            before it and its own, parameter gradients being there already and not counted. Saved bytes that are freed
            on the way may make this negative.
        first_backward_peak_bytes: The same when its parameter gradients do not exist yet and are made here: they count.
            Gradients made by later parts do not.
        recompute_backward_peak_bytes: Largest number of bytes alive during recomputation and backward beyond the saved
            bytes of all parts before it and its own checkpointed ones, gradients being there already and not counted.
        first_recompute_backward_peak_bytes: The same when its parameter gradients do not exist yet and are made here.
        weight_flops: Floating-point operations of the gradients of its matrices, part of :attr:`backward_flops`: what a
            zero-bubble schedule puts off.
        weight_bytes: Bytes that are kept for them meanwhile: inputs of its linear operations and gradients of outputs.
        forward_peak_if_recomputed: Its forward peak if it is recomputed in backward; ``None`` for the plain one,
            which is an upper bound where nothing but inputs is kept.
        recompute_work: What its operators do when it is recomputed; ``None`` for all that its forward does.
        selective: What is another thing if layers are recomputed by operator; ``None`` where that is not known.
        events: Every allocation, of which the bytes above are sums and peaks; ``None`` where allocations at different
            sizes cannot be matched one by one.

    Head and tail are never recomputed: their recompute expressions equal the others. The head's
    ``checkpointed_saved_bytes`` exceeds its ``saved_bytes`` by what only the recomputed layers keep alive (masks that
    they are called with): count it once, per microbatch in flight, on every stage with recomputed layers.
    """

    kind: str
    example: str
    forward_work: tuple[OperatorCost, ...]
    backward_work: tuple[OperatorCost, ...]
    saved_bytes: sympy.Expr
    checkpointed_saved_bytes: sympy.Expr
    forward_peak_bytes: sympy.Expr
    backward_peak_bytes: sympy.Expr
    first_backward_peak_bytes: sympy.Expr
    recompute_backward_peak_bytes: sympy.Expr
    first_recompute_backward_peak_bytes: sympy.Expr
    weight_flops: sympy.Expr = sympy.S.Zero
    weight_bytes: sympy.Expr = sympy.S.Zero
    forward_collectives: tuple[CollectiveSpec, ...] = ()
    backward_collectives: tuple[CollectiveSpec, ...] = ()
    forward_peak_if_recomputed: sympy.Expr | None = None
    recompute_work: tuple[OperatorCost, ...] | None = None
    selective: SelectiveSpec | None = None
    events: LayerEvents | None = None

    def by_operator(self, found: SelectiveSpec) -> "LayerSpec":
        """The same part where layers are recomputed by operator."""
        events = self.events
        if events is not None and found.events is not None:
            events = replace(events, recomputed_first=found.events[0], recomputed_later=found.events[1])
        return replace(
            self,
            checkpointed_saved_bytes=found.saved_bytes,
            recompute_backward_peak_bytes=found.backward_peak_bytes,
            first_recompute_backward_peak_bytes=found.first_backward_peak_bytes,
            forward_peak_if_recomputed=found.forward_peak_bytes,
            recompute_work=found.work,
            selective=None,
            events=events,
        )

    def in_chunks(self, count: int, beside: sympy.Expr, share: "_Share") -> "LayerSpec":
        """The tail where it takes chunks, each of which runs forward and backward in its backward.

        Beside a chunk the gradient of what all are given is alive, and behind the first chunk those of its parameters.
        A chunk of tokens is given a copy of its own.

        Args:
            beside: Bytes of what does not depend on parameters, which every chunk makes for itself.

        Raises:
            PlanError: If its allocations are not known one by one.
        """
        if self.events is None:
            raise PlanError(f"tail_chunks = {count}: what that costs is known of traced networks only; use 1")
        made = self.events.first.backward
        whole = sympy.Add(*(item.size.expression for item in made if item.slot is not None))
        handed, own = whole + _of_chunk(beside, share), _of_chunk(whole, share) if share.symbol == SEQUENCE else 0
        gradients = sympy.Add(*(item.size.expression for item in made if item.parameter))
        # What it lets go of in its forward is kept until its backward now.
        kept = handed if any(item.dies.direction == "forward" for item in self.events.first.entering) else sympy.S.Zero
        saved, later = (_of_chunk(item, share) for item in (self.saved_bytes, self.backward_peak_bytes))
        each = own + sympy.Max(_of_chunk(self.forward_peak_bytes, share), saved + later)
        first = sympy.Max(own + saved + _of_chunk(self.first_backward_peak_bytes, share), gradients + each)
        work = tuple(
            replace(
                item,
                flops=count * _of_chunk(item.flops, share),
                moved_bytes=count * _of_chunk(item.moved_bytes, share),
                calls=count * item.calls,
            )
            for item in (*self.forward_work, *self.backward_work)
        )
        ways = self.events.first, self.events.later
        first_made, added = (_chunked(way, self.events.later, count, share) for way in ways)
        return replace(
            self,
            forward_work=(),
            backward_work=work,
            recompute_work=None,
            saved_bytes=kept,
            checkpointed_saved_bytes=kept,
            forward_peak_bytes=kept,
            forward_peak_if_recomputed=None,
            backward_peak_bytes=handed + each,
            recompute_backward_peak_bytes=handed + each,
            first_backward_peak_bytes=handed + first,
            first_recompute_backward_peak_bytes=handed + first,
            weight_flops=sympy.S.Zero,
            weight_bytes=sympy.S.Zero,
            events=LayerEvents(first=first_made, later=added, recomputed_first=first_made, recomputed_later=added),
        )

    @property
    def forward_flops(self) -> sympy.Expr:
        """Floating-point operations of its forward."""
        return sympy.Add(*(item.flops for item in self.forward_work))

    @property
    def backward_flops(self) -> sympy.Expr:
        """Floating-point operations of its backward."""
        return sympy.Add(*(item.flops for item in self.backward_work))

    @property
    def forward_operators(self) -> int:
        """Number of operators of its forward."""
        return sum(item.calls for item in self.forward_work)

    @property
    def backward_operators(self) -> int:
        """Number of operators of its backward."""
        return sum(item.calls for item in self.backward_work)


_Parted = TypeVar("_Parted", "SplitSpec", "ModelSpec")
"""What has a head, layers and a tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSpec:
    """What one tensor- or context-parallel rank of a network costs.

    Attributes:
        sequence_parallel: Whether activations between split operations are shared out along the sequence.
        head, layers, tail, boundaries: As in :class:`ModelSpec`, for one rank.
        parameter_bytes: Bytes of one rank's part of each parameter, in the order of :attr:`ModelSpec.parameters`.
    """

    degree: int
    sequence_parallel: bool
    head: LayerSpec
    layers: tuple[LayerSpec, ...]
    tail: LayerSpec
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    parameter_bytes: tuple[int, ...]


def _by_operator(found: _Parted) -> _Parted | None:
    """The same where layers are recomputed by operator; ``None`` if it is not known what that costs."""
    parts = found.head, *found.layers, found.tail
    made = [part.by_operator(part.selective) for part in parts if part.selective is not None]
    if len(made) < len(parts):
        return None
    return replace(found, head=made[0], layers=tuple(made[1:-1]), tail=made[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Measured seconds of one kind of layer at a number of microbatch sizes, for interpolation between them.

    Attributes:
        rows: Microbatch rows, ascending.
        forward: Median seconds of one forward at each size.
        backward: Median seconds of one backward at each size, without recomputation.
        layers: Positions of the layers of this kind; empty for head and tail.
    """

    kind: str
    rows: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A network for the cost model.

    Attributes:
        module_map: Blocks, cuts, parameter uses and exclusions.
        head: What runs before the first block (and the whole step if there are no blocks).
        kinds: For every layer position, the index of its kind in :attr:`layers`.
        tail: What runs after the last block.
        boundaries: For each layer position ``k`` in ``1 .. L-1`` at index ``k - 1``, the tensors crossing the cut.
        parameters: Every parameter once, in the order of ``module.parameters()``.
        buffer_bytes: Bytes of all buffers, and of tensors that the module keeps as plain attributes from its first step
            on (every stage keeps them).
        batch_bytes: Bytes of a batch of ``b`` rows.
        batch_rows: Rows per rank of the traced batch.
        sequence_length: Length of the traced batch, if it has a sequence dimension.
        optimizer: What the optimizer keeps; AdamW's needs are assumed, and noted, where none was given.
        precision: Lightning's name of the precision, for example ``"bf16-mixed"``.
        master_weights: Whether trained parameters, in 16 bits here, have masters in 32, which count as state of the
            optimizer.
        seconds: Measured seconds of layers on the machine at hand; empty if nothing was measured.
        shared_saved_bytes: The part of the head's saved bytes that depends on the batch alone, not on parameters
            (masks, position tables): every stage after the first computes and keeps it too, per microbatch in flight.
        splits: What one rank costs under tensor parallelism, one entry per degree and kind that is known.
        contexts: What one rank holds under context parallelism, one entry per degree that was traced.
        notes: What could not be expressed or had to be assumed, in words for the user.
        compiled: Which blocks the user compiles, in words; empty if none.
        unpriced: What multiplies in types that no rates are known of, in words.
        head_width: Numbers in a head of its fused attention, the most if they differ; 0 if there is none or it is not
            known.
    """

    name: str
    module_map: ModuleMap
    head: LayerSpec
    layers: tuple[LayerSpec, ...]
    kinds: tuple[int, ...]
    tail: LayerSpec
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    parameters: tuple[ParameterSpec, ...]
    buffer_bytes: int
    batch_bytes: sympy.Expr
    batch_rows: int
    sequence_length: int | None
    optimizer: OptimizerSpec
    precision: str = "32-true"
    master_weights: bool = False
    seconds: tuple[LayerSeconds, ...] = field(default=())
    shared_saved_bytes: sympy.Expr = field(default=sympy.S.Zero)
    splits: tuple[SplitSpec, ...] = ()
    contexts: tuple[SplitSpec, ...] = ()
    notes: tuple[str, ...] = ()
    head_width: int = 0
    compiled: str = ""
    unpriced: tuple[str, ...] = ()

    @property
    def precision_text(self) -> str:
        """The precision, for people."""
        return f"{self.precision} with fp32 master weights" if self.master_weights else self.precision

    @property
    def num_layers(self) -> int:
        """Number of repeated blocks."""
        return len(self.kinds)

    @property
    def recomputes_by_operator(self) -> bool:
        """Whether it is known what layers cost that are recomputed by operator."""
        return all(part.selective is not None for part in (self.head, *self.layers, self.tail))

    def computing(self, method: StageMethod) -> "ModelSpec":
        """The network as a stage computes it; splits are asked for before.

        Raises:
            PlanError: If what that costs is not known.
        """
        found = self
        if method.checkpointing != "full":
            parts = _by_operator(self)
            if parts is None:
                raise PlanError(
                    f"checkpointing = 'selective': what that costs is not known for {self.name}; use 'full', or trace "
                    "the module"
                )
            found = replace(parts, splits=(), contexts=tuple(filter(None, map(_by_operator, self.contexts))))
        return found if method.tail_chunks == 1 else found._in_chunks(method.tail_chunks)

    def evenly(self) -> "ModelSpec":
        """The network as fits share it out whose optimizer treats every entry by itself: ranks have even pieces."""
        why = f"{self.optimizer.name} is not known to treat every entry by itself"
        dealt, even = self.module_map.excluding(why, "even_shards"), replace(self.module_map, even_shards=True)
        return replace(self, module_map=even if self.optimizer.is_entrywise else dealt)

    def _in_chunks(self, count: int) -> "ModelSpec":
        """The network whose tail takes chunks: of tokens, as far as is known, or of rows."""
        length, lap = self.sequence_length, self.module_map.lap or 0
        share = _Share(MICROBATCH, 1, count)
        if length and self.module_map.cuts_tokens:
            share = _Share(SEQUENCE, ceil((length - lap) / count) + lap, length)
        # One size says nothing of what a chunk costs however small it is.
        times = count if any(len(item.rows) > 1 for item in self.seconds if item.kind == self.tail.kind) else 1
        seconds = (
            item
            if item.kind != self.tail.kind
            else replace(
                item,
                rows=tuple(times * rows for rows in item.rows),
                forward=(0.0,) * len(item.rows),
                backward=tuple(times * (one + two) for one, two in zip(item.forward, item.backward, strict=True)),
            )
            for item in self.seconds
        )
        tail = self.tail.in_chunks(count, self.shared_saved_bytes, share)
        return replace(self, tail=tail, seconds=tuple(seconds), splits=())

    def split(self, degree: int, sequence_parallel: bool = False) -> "ModelSpec":
        """One tensor-parallel rank's part as a network by itself; measured seconds stay those of the whole.

        Raises:
            PlanError: If its costs are not known.
        """
        if degree == 1 and not sequence_parallel:
            return self
        for found in self.splits:
            if (found.degree, found.sequence_parallel) == (degree, sequence_parallel):
                return self._as(found)
        known = sorted({1, *(item.degree for item in self.splits if item.sequence_parallel == sequence_parallel)})
        with_sequence = " with sequence_parallel" if sequence_parallel else ""
        raise PlanError(
            f"tensor_parallel_degree = {degree}{with_sequence}: what that costs is not known for {self.name}; use "
            f"{' or '.join(map(str, known))}"
        )

    def on_row_part(self, degree: int) -> "ModelSpec | None":
        """What one of the devices that share rows does, as a network by itself; ``None`` if it was not traced."""
        return self if degree == 1 else next((self._as(each) for each in self.contexts if each.degree == degree), None)

    def _as(self, found: SplitSpec) -> "ModelSpec":
        """The network as one rank has it."""
        parts = zip(self.parameters, found.parameter_bytes, strict=True)
        return replace(
            self,
            head=found.head,
            layers=found.layers,
            tail=found.tail,
            boundaries=found.boundaries,
            parameters=tuple(
                replace(item, numel=item.numel * part // max(1, item.bytes), bytes=part) for item, part in parts
            ),
            splits=(),
            contexts=(),
        )


class _Share(NamedTuple):
    """What the largest of some chunks has of the rows, or of the tokens: so many of so many."""

    symbol: sympy.Symbol
    part: int
    every: int

    def of(self, size: Polynomial) -> Polynomial:
        """A size for the chunk."""
        each = [powers[self.symbol == SEQUENCE] for powers in size.powers]
        most = max(each, default=0)
        terms = (
            c * self.part**power * self.every ** (most - power)
            for c, power in zip(size.coefficients, each, strict=True)
        )
        return replace(size, coefficients=tuple(terms), denominator=size.denominator * self.every**most)


def _of_chunk(size: sympy.Expr, share: _Share) -> sympy.Expr:
    return sympy.sympify(size).subs(share.symbol, share.symbol * sympy.Rational(share.part, share.every))


def _chunked(first: PartEvents, later: PartEvents, count: int, share: _Share) -> PartEvents:
    """Allocations of a tail that takes chunks: chunk after chunk at the beginning of its backward."""
    # What others leave to the tail is freed at positions of its own backward, from 0 on: chunks come before these.
    lengths = [way.forward_positions + way.backward_positions + 3 for way in (first, *[later] * (count - 1))]
    begin = -sum(lengths)
    handed = [replace(item, born=_behind(begin)) for item in first.backward if item.slot is not None]
    found = list(handed)
    for number, length in enumerate(lengths):
        for item in handed if share.symbol == SEQUENCE else ():
            own = replace(item, size=share.of(item.size), slot=None, weights=(), role="temporary")
            found.append(replace(own, dies=_behind(begin + length), born=_behind(begin)))
        way, turn = later if number else first, length - 2 - (later if number else first).backward_positions
        for item in (*way.forward, *way.backward):
            is_own = item.dies is None or (item.dies.anchor, item.dies.part, item.slot) == ("own", 0, None)
            born, dies = (
                None if point is None else begin + point.position + (turn if point.direction == "backward" else 0)
                for point in (item.born, item.dies if is_own else StepPoint(direction="forward", position=length))
            )
            made = replace(item, size=share.of(item.size), born=_behind(born or 0), slot=None, weights=())
            made = replace(made, dies=None if dies is None else _behind(min(dies, begin + length)))
            found.append(replace(made, parameter="", role="temporary") if number and item.parameter else made)
        begin += length
    return replace(
        first,
        forward=(),
        backward=tuple(found),
        entering=tuple(
            replace(item, weights=(), dies=item.dies if item.dies.direction == "backward" else _behind(0))
            for item in first.entering
        ),
        reading=(),
    )


def _behind(position: int) -> StepPoint:
    return StepPoint(direction="backward", position=position)


RATIO = 2
"""Bytes of a master, and of what is added up of its gradient, per byte of the parameter: 32 bits for 16."""

MASTERS_PRECISION = "bf16-true"
"""Lightning's name of the precision that can have master weights: gradients in float16 would have to be scaled."""


def with_master_weights(spec: ModelSpec, optimizer: OptimizerSpec | None = None) -> ModelSpec:
    """The same network with masters in 32 bits.

    Masters are counted with the optimizer's state: they are held, sharded and updated with it.

    Args:
        optimizer: What the optimizer needs per byte of parameters in 32 bits; by default what the network says.

    Raises:
        ValueError: If its precision has no master weights.
    """
    if spec.precision != MASTERS_PRECISION:
        raise ValueError(f"master weights in {spec.precision}: they are for {MASTERS_PRECISION}; ask for that")
    of = optimizer or spec.optimizer
    made = replace(
        of,
        state_bytes_per_parameter_byte=RATIO * (1 + of.state_bytes_per_parameter_byte),
        step_peak_bytes_per_parameter_byte=RATIO * of.step_peak_bytes_per_parameter_byte,
        step_peak_bytes_per_largest=RATIO * of.step_peak_bytes_per_largest,
        # A master is read, and its cast written.
        step_moved_bytes_per_parameter_byte=RATIO * of.step_moved_bytes_per_parameter_byte + RATIO + 1,
        step_left_bytes_per_parameter_byte=RATIO * of.step_left_bytes_per_parameter_byte,
        step_seconds_per_parameter_byte=RATIO * of.step_seconds_per_parameter_byte,
        gradient_bytes_per_parameter_byte=RATIO,
    )
    return replace(spec, optimizer=made, master_weights=True)
