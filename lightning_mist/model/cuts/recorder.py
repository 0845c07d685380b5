"""Watching one run of the user's step in which everything that depends on parameters is a fake tensor.

A fake tensor has a shape but no values, so a run costs no arithmetic, and "depends on a parameter" is tracked exactly:
an operator on a fake gives a fake. Numbers drawn by torch are followed beside that. The record says which blocks ran in
which order, where every such value was made and last used, which parameter was used where, and what the step did that a
cut module could not do: reading a value into Python, changing a buffer, talking to other processes.

Where a fake's value is read into Python the run goes on with a guess. Whether that matters depends on where it
happened: the stage that computes what comes after the last block has the real values.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten

from lightning_mist.attributes import replaced
from lightning_mist.model.fakes import (
    Guesses,
    TensorRead,
    address_of,
    fake_like,
    fake_parameters,
    find_obstacle,
    quiet_fakes,
    state_of,
    storage_of,
    too_many,
)
from lightning_mist.model.user_code import Generators, ModuleState, unchanged
from lightning_mist.plan.calls import (
    block_value,
    intercepted,
    is_simple,
    leaves_of,
    occurrence,
    results,
    select,
    user_line,
    without_caches,
)
from lightning_mist.tensors import batch_rows, batch_tensors, copy_batch, is_writing
from lightning_mist.without_values import (
    INDEXING,
    READS,
    become,
    fake_mode,
    guess_read,
    is_known_mask,
    is_read,
    some_places,
)

Call = Callable[..., Any]

_UNIFORM = frozenset(("rand", "rand_like", "uniform_"))
_EFFECTS = frozenset(("__set__", "backward"))
"""Functions that use their arguments though they return no tensor, besides reads and item assignment."""


class Refused(BaseException):
    """Ends a run that cannot go on; passes the user's ``except Exception``."""


@dataclass(slots=True)
class Value:
    """A tensor that a run made, and its regions of definition and last use; the rest is known at the end of the run."""

    tensor: Tensor
    defined: int
    last_used: int = -2
    used_behind: int = -2  # the last region behind whose block it was used
    requires_grad: bool = False
    storage: int = 0


class Output(NamedTuple):
    """What a block returned.

    Attributes:
        leaves: One entry per leaf: ``("input", i)`` for the i-th argument leaf passed through, ``("tensor", shape,
            depends)`` with ``depends`` telling whether it depends on parameters, ``("value", x)`` for a Python value,
            or ``("opaque", class)``.
    """

    structure: TreeSpec
    leaves: tuple[tuple[Any, ...], ...]


@dataclass(slots=True)
class Record:
    """What one run of the step did. Regions are positions of blocks in the order in which they were entered."""

    order: list[str] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    values: dict[Hashable, Value] = field(default_factory=dict)
    parameter_uses: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    misplaced: dict[int, str] = field(default_factory=dict)  # by region a parameter that lies where it is not used
    differentiated: set[tuple[str, str]] = field(default_factory=set)
    leaking: set[int] = field(default_factory=set)
    guessing: set[int] = field(default_factory=set)  # those of them of which what leaks may hang on guesses
    reads: list[TensorRead] = field(default_factory=list)
    buffers: dict[str, str] = field(default_factory=dict)
    written_parameters: dict[str, str] = field(default_factory=dict)
    stray_parameters: dict[str, str] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    repeated: dict[str, str] = field(default_factory=dict)
    nested: dict[str, str] = field(default_factory=dict)
    closures: dict[str, str] = field(default_factory=dict)
    indexes_by_mask: bool = False


_DATA = vars(torch._C.TensorBase)["data"]  # sets values where no version counter shows it


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random, self.count = False, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if endless := too_many(self.count):
            raise Refused(endless)
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Refused(
                f"the step talks to other processes itself ({func._schema.name} at {user_line()}): the stages of a "
                "pipeline would wait for one another in different orders"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        return func(*args, **(kwargs or {}))


class StepRecorder(TorchFunctionMode):
    """Fills a :class:`Record` while it is entered.

    Args:
        originals: Names of the real parameters by ``id``, to notice references past the slots.
        guess: What reads of unknown truth values answer in this run.
        attempt: Number of this run; guessed numbers and the ends of drawn ones differ between runs.
    """

    def __init__(
        self,
        *,
        slots: dict[int, tuple[str, str]],
        originals: dict[int, str],
        buffers: dict[int, str],
        guess: bool,
        attempt: int,
    ) -> None:
        super().__init__()
        self.record = Record()
        self._slots, self._originals, self._buffers = slots, originals, buffers
        self._storages: dict[int, tuple[Tensor, tuple[str, str]]] = {}
        self._guess, self._attempt = guess, attempt
        self._guesses = Guesses()
        self._counts: dict[Hashable, int] = {}
        self._operators = _Operators()
        self._keys: dict[int, Hashable] = {}
        self._blocks: dict[int, int | None] = {}
        self._random: set[int] = set()
        self._guessed_in: set[int | None] = set()
        self._behind_guess: set[int] = set()
        self._arguments: set[int] = set()
        self._kept: list[Any] = []
        self._became: list[tuple[Tensor, Tensor]] = []
        self._region = -1
        self._inside: int | None = None

    def __enter__(self) -> "StepRecorder":
        self._operators.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._operators.__exit__(*error)  # type: ignore[no-untyped-call]

    def run(self, call: Call, batch: Any, blocks: Mapping[str, nn.Module], kept: Callable[[], Any]) -> None:
        """Record a whole run of the step; ``kept`` gives what is needed of it besides what it returned."""
        self.know(batch_tensors(batch))
        names, watched = tuple(blocks), tuple(blocks.values())
        with intercepted(watched, lambda at, forward: partial(self.call_block, names[at], forward)), self:
            output = call(batch)
        self.finish((output, kept()))

    def finish(self, output: tuple[Any, Any]) -> Record:
        """Count what the step returned, and what is kept of it, as used, and hand over the record."""
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, Tensor):
                self._use(leaf)
        loss = output[0].get("loss", output[0]) if isinstance(output[0], dict) else output[0]
        behind, is_all = _behind(loss)
        self.record.differentiated = {self._slots[id(p)] for p in behind if id(p) in self._slots}
        if not is_all:
            self.record.differentiated |= self.record.parameter_uses.keys()
        for value in self.record.values.values():
            value.requires_grad = value.tensor.requires_grad
            value.storage = storage_of(value.tensor)
        return self.record

    def undo(self) -> None:
        """Give tensors that turned into fakes their contents back."""
        while self._became:
            become(*self._became.pop())

    def know_storages(self, fakes: Iterable[Tensor]) -> None:
        """Remember where parameters are: views, and what ``.data`` gives, lie there too; kept, so none is another's."""
        self._storages = {storage_of(item): (item.detach(), self._slots[id(item)]) for item in fakes}

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors of the batch: a block that reads one which is not its argument cannot run again later."""
        self._blocks.update((id(tensor), None) for tensor in tensors)

    def _is_unknown(self, tensor: Any) -> bool:
        """Whether a stage that lacks some parameters or random numbers does not have this value."""
        return isinstance(tensor, FakeTensor) or id(tensor) in self._random

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", type(func).__name__)
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(t, FakeTensor) for t in tensors)
        if is_read(name, args, kwargs):
            if is_fake:
                return self._guessed(name, args, kwargs, tensors)
            if any(id(t) in self._random for t in tensors):
                return self._read_random(name, func, args, kwargs, tensors)
        if is_fake:
            if name in INDEXING:
                func, args = self._index(name, func, args)
            if isinstance(args[0] if args else None, Tensor) and not isinstance(args[0], FakeTensor):
                self._before_write(name, args[0], tensors)
        return self._call(name, func, args, kwargs, tensors)

    def _call(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        versions = [-1 if t.is_inference() else t._version for t in tensors]
        self._operators.is_random = False
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self._note_read(name, "parameters", None)
            raise Refused from error
        written = [t for t, v in zip(tensors, versions, strict=True) if v >= 0 and t._version != v]
        made = [leaf for leaf in results(name, args, output) if isinstance(leaf, Tensor)]
        if made or written or name in _EFFECTS or name in READS:
            for tensor in tensors:
                self._use(tensor)
        for tensor in written if name != "__set__" or getattr(func, "__self__", None) is not _DATA else tensors[:1]:
            self._written(tensor)
        if name in ("batch_norm", "instance_norm"):
            self._normalised(name, args, kwargs)
        if made:
            self._made(name, made, is_random=self._operators.is_random or any(id(t) in self._random for t in tensors))
        return output

    def _made(self, name: str, made: list[Tensor], *, is_random: bool) -> None:
        # Counted whether or not a result matters here: on a stage other values are known than in this run.
        base = occurrence(self._counts, "glue" if self._inside is None else "inner", self._region, name)
        for leaf, tensor in enumerate(made):
            if id(tensor) in self._slots or id(tensor) in self._originals:
                continue
            if not isinstance(tensor, FakeTensor):
                if not is_random:
                    self._kept.append(tensor)
                    self._blocks[id(tensor)] = self._inside
                    continue
                self._random.add(id(tensor))
                if name in _UNIFORM and self._attempt:
                    # The other end of what may be drawn: a decision that depends on it then shows.
                    with torch.no_grad():
                        tensor.zero_()
            self._define(tensor, (*base, leaf))

    def _define(self, tensor: Tensor, key: Hashable) -> None:
        self._kept.append(tensor)
        self._keys[id(tensor)] = key
        self._blocks[id(tensor)] = self._inside
        if self._inside in self._guessed_in:
            self._behind_guess.add(id(tensor))
        self.record.values[key] = Value(tensor, self._region)

    def _use(self, tensor: Tensor) -> None:
        slot = self._slots.get(id(tensor))
        if slot is not None:
            self.record.parameter_uses[slot].add(self._region)
            lies_in = f"{slot[0]}.".startswith(f"{self.record.order[self._region]}.") if self._region >= 0 else False
            if lies_in != (self._inside is not None):
                where = ("in", "behind") if lies_in else ("outside of", "in")
                name = ".".join(filter(None, slot))
                self.record.misplaced[self._region] = f"{name} lies {where[0]} the last layer and is used {where[1]} it"
            return
        if id(tensor) in self._originals:
            self.record.stray_parameters.setdefault(self._originals[id(tensor)], user_line())
            return
        home = self._blocks.get(id(tensor), self._inside)
        if self._inside is not None and home != self._inside and id(tensor) not in self._arguments:
            self.record.closures.setdefault(self.record.order[self._inside], user_line())
        key = self._keys.get(id(tensor))
        if key is None:
            if not isinstance(tensor, FakeTensor):
                return
            # Made where no function was seen, in a custom autograd function for example.
            key = ("unseen", self._region, len(self.record.values), user_line())
            self._define(tensor, key)
        value = self.record.values[key]
        value.last_used = max(value.last_used, self._region)
        if len(self.record.outputs) > self._region:
            value.used_behind = self._region
        if home is not None and home != self._inside:
            self._leaks(home, hangs=id(tensor) in self._behind_guess)

    def _leaks(self, position: int, *, hangs: bool = True) -> None:
        """Something inside a block is used outside; where it was made before anything was guessed there it is known."""
        self.record.leaking.add(position)
        if hangs:
            self.record.guessing.add(position)

    def _read_random(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        output = self._call(name, func, args, kwargs, tensors)
        shown = output if isinstance(output, (bool, int, float, complex, str)) else repr(output)
        self._note_read(name, "random numbers", shown)
        return output

    def _guessed(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        for tensor in tensors:
            self._use(tensor)
        self._note_read(name, "parameters", None)
        if self._inside is not None:
            self._guessed_in.add(self._inside)
        endless = self._guesses.note(self._operators.count, self._region)
        if endless:
            raise Refused(endless)
        number, every = 1.0 + self._attempt / 4, 1 + self._attempt
        return guess_read(name, args, kwargs, tensors[0], truth=self._guess, number=number, every=every)

    def _index(self, name: str, func: Any, args: Any) -> tuple[Any, Any]:
        """An indexing with its masks as positions: those of a known mask, or all of them where it is not known."""
        items = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = [item for item in items if _is_mask(item)]
        for mask in masks:
            self._use(mask)
        if not masks or (name == "__setitem__" and any(self._is_unknown(mask) for mask in masks)):
            return func, args
        if any(self._is_unknown(mask) for mask in masks):
            self._note_read("indexing by a mask", "parameters", None)
        else:
            self.record.indexes_by_mask = True
        known = tuple(
            some_places(i.shape, 1 + self._attempt) if _is_mask(i) and self._is_unknown(i) else i for i in items
        )
        args = (args[0], known if isinstance(args[1], tuple) else known[0], *args[2:])
        return select(name, func, args, is_known_mask)

    def _note_read(self, name: str, source: str, value: Any) -> None:
        shown = name if " " in name else f"{name}()" if name.startswith("__") else f".{name}()"
        self.record.reads.append(TensorRead(shown, user_line(), self._region, self._inside is not None, source, value))

    def _before_write(self, name: str, target: Tensor, tensors: list[Tensor]) -> None:
        """A real tensor into which a fake is about to be written depends on parameters from here on."""
        if not is_writing(name):
            return
        buffer = self._buffers.get(address_of(target))
        if buffer is not None:
            self.record.buffers.setdefault(buffer, user_line())
        elif target._is_view():
            self.record.problems.append(
                f"a value that depends on parameters is written into a part of another tensor ({name} at {user_line()})"
            )
        else:
            mode = next(t for t in tensors if isinstance(t, FakeTensor)).fake_mode
            fake = fake_like(target, mode, target.device)
            become(target, fake)
            self._became.append((target, fake))

    def _written(self, tensor: Tensor) -> None:
        slot = self._slots.get(id(tensor)) or self._storages.get(storage_of(tensor), (tensor, None))[1]
        if slot is not None:
            self.record.written_parameters.setdefault(".".join(filter(None, slot)), user_line())
        elif self._is_unknown(tensor):
            self.record.writes.append((storage_of(tensor), self._region))
        elif address_of(tensor) in self._buffers:
            self.record.buffers.setdefault(self._buffers[address_of(tensor)], user_line())
        elif self._inside is not None:
            # A block that is skipped would not do this to a tensor that others read.
            self._leaks(self._inside)

    def _normalised(self, name: str, args: Any, kwargs: Any) -> None:
        """Batch statistics are written where no version counter shows it."""
        positional = ("input", "running_mean", "running_var", "weight", "bias", "training")
        values = {**dict(zip(positional, args, strict=False)), **kwargs}
        is_written = values.get("use_input_stats" if name == "instance_norm" else "training", values.get("training"))
        mean = values.get("running_mean")
        if is_written and mean is not None and address_of(mean) in self._buffers:
            self.record.buffers.setdefault(self._buffers[address_of(mean)], user_line())

    def call_block(self, name: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a block's ``forward`` and record entry, output and exit."""
        if self._inside is not None:
            outer = self.record.order[self._inside]
            if outer != name:
                self.record.nested.setdefault(name, outer)
            return original(*args, **kwargs)
        if name in self.record.order:
            self.record.repeated.setdefault(name, user_line())
            return original(*args, **kwargs)
        return self._run_block(name, original, *without_caches(args, kwargs))

    def _run_block(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._region += 1
        position = self._region
        self.record.order.append(name)
        inputs = tree_flatten((args, kwargs))[0]
        for leaf in inputs:
            if isinstance(leaf, Tensor):
                self._use(leaf)
        before = [state_of(leaf) for leaf in inputs]
        reads = len(self.record.reads)
        self._arguments = {id(leaf) for leaf in inputs}
        with replaced(self, _inside=position):
            output = original(*args, **kwargs)
        after = tree_flatten((args, kwargs))[0]
        leaves, structure = tree_flatten(output)
        described = tuple(_describe(leaf, inputs) for leaf in leaves)
        self.record.outputs.append(Output(structure, described))
        has_value = any(kind == "value" and rest[0] is not None for kind, *rest in described)
        if [state_of(leaf) for leaf in after] != before or (has_value and len(self.record.reads) > reads):
            self._leaks(position)
        if any(kind == "opaque" or (kind == "tensor" and not rest[-1]) for kind, *rest in described):
            self._leaks(position)
        passed = {id(leaf) for leaf in inputs if isinstance(leaf, Tensor)} | self._slots.keys()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in passed and self._is_unknown(leaf):
                self._define(leaf, block_value(position, index))
        return output


def _behind(value: Any) -> tuple[list[Tensor], bool]:
    """The leaves to which a backward from a nesting of tensors would bring gradients; whether these are all.

    A backward of the user's own may run another one inside.
    """
    nodes: list[Any] = [leaf.grad_fn for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    seen, found = set[Any](), list[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if type(node).__name__ == "AccumulateGrad":
                found.append(node.variable)
    return found, not any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in seen)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == torch.bool


def _describe(leaf: Any, inputs: list[Any]) -> tuple[Any, ...]:
    """What a leaf of a block's output is; see :class:`Output`."""
    if not isinstance(leaf, Tensor):
        return ("value", leaf) if is_simple(leaf) else ("opaque", type(leaf).__qualname__)
    for index, other in enumerate(inputs):
        if other is leaf:
            return ("input", index)
    return ("tensor", tuple(leaf.shape), isinstance(leaf, FakeTensor))


# Running the user's step twice on fake parameters, and putting everything back.


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Two runs of a step, and what they left behind."""

    records: tuple[Record, ...]  # what each run did; empty if one of them failed
    failure: str  # why, in words
    rows: tuple[int | None, ...]  # rows of each run's batch, None where they cannot be told
    states: tuple[ModuleState, ...]  # the module before, between and after the runs
    outside: tuple[str, ...]  # names of the generators outside torch that were drawn from
    batch_changed: bool


def run_twice(
    module: nn.Module,
    call: Call,
    batches: tuple[Any, Any],
    candidates: tuple[str, ...],
    kept: Callable[[], Any] = tuple,
) -> Runs:
    """Run the step on copies of two batches, all parameters being fakes; the module is left as it was.

    Where the step reads an unknown truth value it is told False, and if it then fails, True.
    """
    failures = []
    for guess in (False, True):
        recorders: list[StepRecorder] = []
        with unchanged(module) as before, quiet_fakes():
            try:
                runs = _attempt(module, call, batches, candidates, recorders, kept=kept, guess=guess, before=before)
            finally:
                for recorder in reversed(recorders):
                    recorder.undo()
        if runs.records:
            return runs
        failures.append(runs)
        if not any(recorder.record.reads for recorder in recorders):
            break
    return failures[0]


def _attempt(
    module: nn.Module,
    call: Call,
    batches: tuple[Any, Any],
    candidates: tuple[str, ...],
    recorders: list[StepRecorder],
    *,
    kept: Callable[[], Any],
    guess: bool,
    before: ModuleState,
) -> Runs:
    generators = Generators()
    blocks = {name: module.get_submodule(name) for name in candidates}
    originals = {id(parameter): name for name, parameter in module.named_parameters()}
    buffers = {address_of(b): name for name, b in module.named_buffers(remove_duplicate=False) if b.numel()}
    slots = fake_parameters(module, fake_mode())
    records: list[Record] = []
    states = [before]
    failure, batch_changed = "", False
    for attempt, batch in enumerate(batches):
        recorder = StepRecorder(slots=slots, originals=originals, buffers=buffers, guess=guess, attempt=attempt)
        recorder.know_storages(module.parameters())
        recorders.append(recorder)
        own = copy_batch(batch, with_tensors=True)
        versions = [(tensor, tensor._version) for tensor in batch_tensors(own)]
        try:
            recorder.run(call, own, blocks, kept)
        except (Exception, Refused) as error:
            records, failure = [], _failure(recorder.record, error, module)
            break
        batch_changed = batch_changed or any(tensor._version != version for tensor, version in versions)
        records.append(recorder.record)
        states.append(ModuleState(module))
    return Runs(
        records=tuple(records),
        failure=failure,
        rows=tuple(batch_rows(batch) for batch in batches),
        states=tuple(states),
        outside=tuple(generators.outside_torch(Generators())),
        batch_changed=batch_changed,
    )


def _failure(record: Record, error: BaseException, module: nn.Module) -> str:
    obstacle = None if isinstance(error, Refused) else find_obstacle(error, module)
    if obstacle is not None:
        return f"{obstacle}; {obstacle.ways_out}"
    text = f"{type(error).__name__}: {error}" if not isinstance(error, Refused) else str(error)
    reads = [read for read in record.reads if read.source == "parameters"]
    if not reads:
        return text
    what = f"{reads[-1].function} at {reads[-1].line} reads a value that depends on parameters"
    return f"{what} ({text})" if text else what
