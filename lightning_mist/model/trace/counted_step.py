"""One counted run of a user's step, forward and backward, part by part."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_mist.attributes import collector_paused
from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import Origins, device_of, isolated, parameter_slots, quiet_fakes, substitute_parameters
from lightning_mist.model.trace.ledger import Ledger, ParameterProducts, PhaseCount, Storage
from lightning_mist.model.trace.part_hooks import InputSignature, RankView, Walk, loss_of
from lightning_mist.plan import ModuleMap
from lightning_mist.tensor_parallel import local_of
from lightning_mist.tensors import copy_batch
from lightning_mist.without_values import fake_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is run: a module in which substitutes fill the parameter slots, and how."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]  # the repeated blocks in execution order
    parameters: tuple[nn.Parameter, ...]
    mode: FakeTensorMode | None  # the mode that the substitutes are fakes of; ``None`` if they are real
    call: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    view: RankView | None = None  # how one of several tensor-parallel ranks sees the step, if it is about one


@contextmanager
def isolated_subject(
    module: nn.Module,
    call: Callable[[Any], Any],
    batch: Any,
    *,
    blocks: Sequence[str] = (),
    mode: FakeTensorMode | None,
    owners: Mapping[tuple[str, str], object] = MappingProxyType({}),
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Subject]:
    """Inside, a module whose parameter slots hold substitutes; afterwards it is as before."""
    with isolated(module), quiet_fakes():
        yield Subject(
            module=module,
            blocks=tuple(module.get_submodule(name) for name in blocks),
            parameters=substitute_parameters(module, mode, owners, device_of(batch)),
            mode=mode,
            call=call,
            context=context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """What one step did.

    Indices: 0 is the head, ``1 .. L`` the layers, ``L + 1`` the tail. Without blocks the head is the whole step.

    Attributes:
        forward, backward: Operators and timelines; bytes alive in absolute numbers.
        saved: Bytes that each part's forward made and that were alive when the step's forward had ended.
        shared: Those of the head that the batch alone determines.
        made: Bytes of parameter gradients that each part's backward made and left.
        head_width: Numbers in a head of fused attention, the most if they differ; 0 without.
        narrow: What multiplies in 8 bits, in words.
    """

    forward: tuple[PhaseCount, ...]
    backward: tuple[PhaseCount, ...]
    storages: tuple[Storage, ...]
    saved: tuple[int, ...]
    shared: int
    made: tuple[int, ...]
    inputs: tuple[InputSignature, ...]
    entering: tuple[tuple[tuple[int, ...], ...], ...]
    guesses: tuple[tuple[str, int], ...]
    describable: tuple[bool, ...]
    head_width: int
    narrow: tuple[str, ...]

    @property
    def timeline(self) -> list[int]:
        """Bytes alive at every reading, from the head's forward to its backward."""
        return [alive for phase in (*self.forward, *reversed(self.backward)) for alive in phase.timeline]

    def forward_peaks(self, part: int) -> list[int]:
        """Timeline of the part's forward beyond the saved bytes of all parts before it."""
        base = sum(self.saved[:part])
        return [alive - base for alive in self.forward[part].timeline]

    def backward_peaks(self, part: int) -> list[int]:
        """Timeline of the part's backward beyond saved bytes up to its own and gradients that later parts made."""
        base = sum(self.saved[: part + 1]) + sum(self.made[part + 1 :])
        return [alive - base for alive in self.backward[part].timeline]


def count_step(
    subject: Subject,
    batch: Any,
    *,
    twins: Sequence[int | None],
    recompute: bool,
    gradients_exist: bool,
    selective: bool = False,
    attribute: bool = False,
) -> StepCount:
    """Run a step once and count; a :class:`TraceError` if it returns no loss or leaves out a block.

    ``twins`` are, for every block, the earlier one that it imitates, if any; ``gradients_exist`` adds to gradients;
    where blocks are recomputed, ``selective`` keeps their products, convolutions and attention.
    """
    _set_gradients(subject, exist=gradients_exist)
    names = _parameter_names(subject.module) if attribute else {}
    modules = {id(item): name for name, item in subject.module.named_modules()}
    origins = Origins(modules, names) if attribute else None
    ledger = Ledger(len(subject.blocks) + 2, origins)
    blocks = [modules.get(id(block), "") for block in subject.blocks]
    products = ParameterProducts(ledger, subject.parameters, names, blocks)
    walk = _walk(subject, ledger, origins, products, twins, recompute=recompute, selective=selective)
    # What refers to itself lives on: when Python collects has nothing to do with the step, and the ledger takes for
    # gone what is collected.
    with walk.step(), torch.enable_grad(), ledger, collector_paused(), ExitStack() as stack:
        stack.enter_context(products)
        if origins is not None:
            stack.enter_context(origins.watching())
            stack.enter_context(_named_gradients(subject, ledger, names))
        with subject.context():
            value = subject.call(copy_batch(batch))
        _forget(subject)
        if (ran := len(walk.inputs)) != len(blocks):
            raise TraceError(
                f"the step called blocks {ran} times, but has {len(blocks)} of them: each must run exactly once in "
                "every step; blocks that are dropped at random have no fixed cost"
            )
        ledger.end_forward()
        loss = loss_of(value)
        describable = tuple(walk.answers.get(i) is not None for i in range(len(subject.blocks)))
        walk.begin_backward()
        loss.backward()  # type: ignore[no-untyped-call]
    made = _made(subject, ledger, names)
    del value, loss
    ledger.end()
    _forget(subject)
    _set_gradients(subject, exist=False)
    return StepCount(
        forward=tuple(ledger.forward),
        backward=tuple(ledger.backward),
        storages=tuple(ledger.storages),
        saved=_sums(len(ledger.forward), (s for s in ledger.storages if s.saved)),
        shared=sum(s.bytes for s in ledger.storages if s.saved and s.part == 0 and s.shared),
        made=made,
        inputs=tuple(walk.inputs),
        entering=tuple(walk.entering),
        guesses=ledger.guesses.reads,
        describable=describable,
        head_width=ledger.head_width,
        narrow=tuple(f"{module or 'the step'} computes {what}" for what, module in ledger.narrow.items()),
    )


def _set_gradients(subject: Subject, *, exist: bool) -> None:
    for parameter in subject.parameters:
        parameter.grad = torch.zeros_like(parameter) if exist and parameter.requires_grad else None


def _forget(subject: Subject) -> None:
    """Drop what ranks have gathered, as the runtime does behind a step and around what it repeats."""
    if subject.view is not None:
        subject.view.context.forget()


def _walk(
    subject: Subject,
    ledger: Ledger,
    origins: Origins | None,
    products: ParameterProducts,
    twins: Sequence[int | None],
    *,
    recompute: bool,
    selective: bool,
) -> Walk:
    @contextmanager
    def repeating(block: nn.Module | None) -> Iterator[None]:
        _forget(subject)
        with ExitStack() as stack:
            stack.callback(_forget, subject)
            if block is not None:  # what users repeat is not the plan's: it belongs to the backward of its part
                stack.enter_context(ledger.recomputing())
            if origins is not None and block is not None:
                stack.enter_context(origins.inside(block))
            # Modes do not reach what backward runs.
            stack.enter_context(products)
            yield

    view = subject.view
    if view is not None:
        view.group.watcher = ledger.note_collective
    return Walk(
        subject.blocks,
        twins,
        ledger.enter,
        recompute=recompute,
        selective=selective,
        mode=subject.mode,
        keep_values=False,
        view=view,
        given=ledger.note_given,
        repeating=repeating,
    )


def _sums(num_parts: int, storages: Iterator[Storage]) -> tuple[int, ...]:
    sums = [0] * num_parts
    for storage in storages:
        sums[storage.part] += storage.bytes
    return tuple(sums)


def _made(subject: Subject, ledger: Ledger, names: dict[int, str]) -> tuple[int, ...]:
    """Bytes of the parameter gradients that the step made, by part; writes down which parameter each belongs to."""
    found = {}
    for parameter in subject.parameters:
        storage = None if parameter.grad is None else ledger.find(parameter.grad)
        if storage is not None:
            storage.parameter = names.get(id(parameter), "")
            storage.is_gradient = True
            found[id(storage)] = storage
    return _sums(len(ledger.forward), iter(found.values()))


def _parameter_names(module: nn.Module) -> dict[int, str]:
    """Names of what fills the parameter slots: of split ones this rank's part."""
    names: dict[int, str] = {}
    for name, _, attribute, parameter in parameter_slots(module):
        names.setdefault(id(local_of(parameter)), f"{name}.{attribute}" if name else attribute)
    return names


@contextmanager
def _named_gradients(subject: Subject, ledger: Ledger, names: dict[int, str]) -> Iterator[None]:
    """Inside, gradients of parameters are known as such, also those that are only added to others."""

    def note(name: str, gradient: torch.Tensor | None) -> None:
        # Imitations have none for their parameters.
        if gradient is not None and (found := ledger.find(gradient)) is not None:
            found.parameter = name

    with ExitStack() as stack:
        for p in subject.parameters:
            if p.requires_grad:
                stack.enter_context(p.register_hook(partial(note, names.get(id(p), ""))))  # type: ignore[no-untyped-call]
        yield


def step_bytes(module: nn.Module, call: Callable[[Any], Any], batch: Any) -> int:
    """Bytes alive at the peak of forward and backward, gradients included, parameters not.

    Args:
        module: The user's module; left as it was.

    Raises:
        TraceError: If the step does not run on fake tensors.
    """
    with isolated_subject(module, call, batch, mode=fake_mode()) as subject:
        try:
            return max(count_step(subject, batch, twins=(), recompute=False, gradients_exist=False).timeline)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(f"the step does not run on fake tensors: {type(error).__name__}: {error}") from error


# Which blocks cost the same: one traced example answers for all of its kind.


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A part of the step, by its index from head to tail, that stands for its kind."""

    part: int
    follower: int | None  # index of the part after it if that is of the same kind, else ``None``
    label: str
    block: str  # qualified name of the block, if it is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """Blocks sorted into kinds."""

    labels: tuple[str, ...]  # unique name of every kind, in order of first appearance
    examples: tuple[int, ...]  # position of the first block of every kind
    of: tuple[int, ...]  # for every block position, the index of its kind

    def members(self, kind: int) -> tuple[int, ...]:
        """Positions of the blocks of a kind."""
        return tuple(position for position, own in enumerate(self.of) if own == kind)

    def parts(self, blocks: Sequence[str]) -> tuple[Example, ...]:
        """The parts that stand for all: head, examples, tail."""
        last = len(self.of) - 1
        layers = []
        for kind, (position, label) in enumerate(zip(self.examples, self.labels, strict=True)):
            is_followed = position < last and self.of[position + 1] == kind
            layers.append(
                Example(
                    part=position + 1,
                    follower=position + 2 if is_followed else None,
                    label=label,
                    block=blocks[position],
                )
            )
        head = Example(part=0, follower=None, label="head", block="")
        return head, *layers, replace(head, part=last + 2, label="tail")

    def twins(self, *, surrounded: bool = False) -> tuple[int | None, ...]:
        """For every block ``None`` if it runs itself, else the position of the example of its kind.

        Args:
            surrounded: Whether the blocks around an example run too, so that it begins, forward and backward, with what
                a real block leaves alive, and the last block, for the tail. Thereby one block is seen to follow another
                of its kind.
        """
        runs = set(self.examples)
        if surrounded:
            runs |= {len(self.of) - 1, *(position + near for position in self.examples for near in (-1, 1))}
        return tuple(None if i in runs else self.examples[k] for i, k in enumerate(self.of))


def group(names: Sequence[str], keys: Sequence[Hashable]) -> Kinds:
    """Sort blocks into kinds by equal keys."""
    examples: dict[Hashable, int] = {}
    for position, key in enumerate(keys):
        examples.setdefault(key, position)
    order = {key: index for index, key in enumerate(examples)}
    firsts = tuple(examples.values())
    labels: list[str] = []
    for position in firsts:
        name = names[position]
        taken = sum(1 for other in firsts[: len(labels)] if names[other] == name)
        labels.append(name if not taken else f"{name}#{taken + 1}")
    return Kinds(labels=tuple(labels), examples=firsts, of=tuple(order[key] for key in keys))


def module_key(block: nn.Module) -> Hashable:
    """What a block is by itself: its class, and shape, type and training of every parameter."""
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block), block.training, parameters


def cost_keys(blocks: Sequence[nn.Module], counts: Sequence[StepCount]) -> list[Hashable]:
    """Keys under which blocks are of one kind: themselves, their inputs, and all they cost in whole counted runs."""

    def costs(count: StepCount, part: int) -> Hashable:
        forward, backward = count.forward[part], count.backward[part]
        return (
            count.inputs[part - 1],
            (forward.flops, forward.moved_bytes, forward.operators),
            (backward.flops, backward.moved_bytes, backward.operators),
            (count.saved[part], count.made[part]),
            max(count.forward_peaks(part)),
            max(count.backward_peaks(part), default=0),
        )

    return [(module_key(b), *(costs(count, i + 1) for count in counts)) for i, b in enumerate(blocks)]


def trained_beside(module_map: ModuleMap) -> list[tuple[str, ...]]:
    """Of every block the trained parameters outside of it that its part of the step uses, such as adapters kept apart.

    Events know these by their whole names, so that blocks with different ones cannot answer for each other. What the
    last block's part uses cannot be told from the tail's, and the tail's differ from all others'.
    """
    found: list[set[str]] = [set() for _ in module_map.blocks]
    for use in module_map.parameters:
        for module, _, parts in use.slots if use.requires_grad else ():
            for part in parts:
                if 0 <= part < len(found) - 1 and not f"{module}.".startswith(f"{module_map.blocks[part]}."):
                    found[part].add(use.name)
    return [tuple(sorted(names)) for names in found]


def is_faithful(whole: StepCount, brief: StepCount, kinds: Kinds) -> bool:
    """Whether a run in which twins imitate their examples counts the same as the whole run did."""
    parts = (0, *(i + 1 for i in kinds.examples), len(kinds.of) + 1)
    return all(
        (whole.forward[p].flops, whole.forward[p].operators, whole.backward[p].flops, whole.backward[p].operators)
        == (brief.forward[p].flops, brief.forward[p].operators, brief.backward[p].flops, brief.backward[p].operators)
        and whole.saved[p] == brief.saved[p]
        and whole.forward_peaks(p) == brief.forward_peaks(p)
        and whole.backward_peaks(p) == brief.backward_peaks(p)
        for p in parts
    )
