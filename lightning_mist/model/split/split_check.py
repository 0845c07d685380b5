"""Is a block that is shared out the same function as the whole one? Asked with numbers before any plan relies on it.

One call of every kind of block is taken from a step. The block runs whole, and once more by as many ranks (threads of
this process) as would share it: results, gradients of its inputs and of every parameter must be equal up to rounding.
"""

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import (
    Slot,
    WithoutDropout,
    convert,
    convert_plain_tensors,
    filled,
    isolated,
    put,
    resize_batch,
    slots_of,
    thin,
)
from lightning_mist.model.operator_costs import LinearCall, LinearMode
from lightning_mist.model.split.factored import MOST_BYTES, Factored, FactoredRoom, is_factored
from lightning_mist.model.trace import Kinds, group, imitate, module_key, record_answer
from lightning_mist.model.user_code import unchanged
from lightning_mist.plan.calls import call_signature, intercepted, without_caches
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import (
    SplitContext,
    SplitTensor,
    ThreadGroup,
    enter,
    enter_sequence,
    functions_of_wholes,
    leaving,
    part_of,
    present,
    run_ranks,
)
from lightning_mist.tensors import batch_rows, batch_tensors, copy_batch, function_name, is_hollow, sequence_length
from lightning_mist.without_values import BlockAnswer

# How a step calls its blocks: the arguments of one call of every kind, on a batch as small as it will take.

_ROWS = 2  # rows of the batch that a step is tried on: two, so that they can be told apart from a broadcast

Call = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """One call of a block; ``hidden`` is the index of the leaf that it transforms, of the shape of its first result."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    depends: tuple[bool, ...]  # for every leaf of the arguments whether a gradient flows back into it
    answer: BlockAnswer | None  # what it returned, if that can be described
    hidden: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCalls:
    """One call of every kind of block."""

    kinds: Kinds  # which blocks are alike: in parameters, and in the arguments they get
    examples: tuple[BlockCall, ...]
    batch: Any


class _Over(BaseException):
    """Leaves the step when all blocks have been called; user code that catches Exception does not catch it."""


class _HollowLinears(LinearMode):
    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        if call.input.is_meta or not is_hollow(call.weight):
            return compute()
        made = torch.randn(call.output_shape, dtype=call.input.dtype, device=call.input.device)
        return made.requires_grad_(torch.is_grad_enabled()).clone()


def small_batches(batch: Any, length: int) -> Iterator[Any]:
    """A small batch of that length, then larger ones up to the given one: steps may need all rows, or full length."""
    if batch_rows(batch) is not None:
        if sequence_length(batch) is not None:
            yield resize_batch(batch, _ROWS, length)
        yield resize_batch(batch, _ROWS, None)
    yield batch


def call_blocks(module: nn.Module, call: Call, batch: Any, names: tuple[str, ...], length: int = 8) -> BlockCalls:
    """Run the step on a small batch of that length until all blocks were called, one of each kind by itself.

    Raises a :class:`TraceError` if the step fails on every batch.
    """
    failure: Exception | None = None
    for small in small_batches(batch, length):
        try:
            return _call_blocks(module, call, small, names)
        except Exception as error:
            failure = error
    raise TraceError(f"the step cannot be run on a small batch: {type(failure).__name__}: {failure}") from failure


def _call_blocks(module: nn.Module, call: Call, batch: Any, names: tuple[str, ...]) -> BlockCalls:
    blocks = tuple(module.get_submodule(name) for name in names)
    keys: dict[int, Hashable] = {}
    examples: dict[Hashable, BlockCall] = {}

    def handler(position: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = without_caches(args, kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        key = (module_key(blocks[position]), call_signature(leaves))
        keys[position] = key
        known = examples.get(key)
        if known is not None and known.answer is not None:
            output = imitate(known.answer, blocks[position], args, kwargs, None)
        else:
            kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            output = forward(*args, **kwargs)
            examples.setdefault(key, _example(blocks[position], (args, kwargs), kept, leaves, output))
        if len(keys) == len(blocks):
            raise _Over
        return output

    with isolated(module), valued(module, batch) as parameters:
        torch.manual_seed(0)
        # Blocks that others answer for do not run; the first of every kind does, its hollow layers aside.
        handled = intercepted(blocks, lambda *called: partial(handler, *called))
        with handled, torch.enable_grad(), _HollowLinears(parameters), suppress(_Over):
            call(copy_batch(batch, with_tensors=True))
    if len(keys) < len(blocks):
        raise TraceError(f"the step called {len(keys)} of {len(blocks)} blocks")
    kinds = group([type(block).__name__ for block in blocks], [keys[i] for i in range(len(blocks))])
    return BlockCalls(kinds=kinds, examples=tuple(examples[keys[i]] for i in kinds.examples), batch=batch)


def _example(block: nn.Module, given: Any, kept: list[Any], leaves: list[Any], output: Any) -> BlockCall:
    args, kwargs = tree_unflatten(kept, tree_flatten(given)[1])
    results = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    depends = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    alike = [
        index
        for index, leaf in enumerate(leaves)
        if results and isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == results[0].shape
    ]
    return BlockCall(
        block=block,
        args=args,
        kwargs=kwargs,
        depends=depends,
        answer=record_answer(given[0], given[1], output, keep_values=True),
        hidden=next((index for index in alike if depends[index]), alike[0] if alike else None),
    )


@contextmanager
def valued(module: nn.Module, batch: Any) -> Iterator[dict[int, Tensor]]:
    """Give parameters without values random rows, inside :func:`isolated` only; yields what slots hold, by ``id``."""
    device = next((tensor.device for tensor in batch_tensors(batch)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    held: dict[int, Tensor] = {}
    for parameter, slots in slots_of(module).values():
        value: Tensor = parameter
        if is_hollow(parameter) and parameter.is_floating_point():
            made = thin(parameter, parameter.dtype, generator).to(device if parameter.is_meta else parameter.device)
            value = nn.Parameter(made, requires_grad=parameter.requires_grad)
            put(slots, value)
        held[id(value)] = value
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = convert(buffer, buffer.dtype, device)
    yield held


# Two runs of one computation, whole and over ranks, held against each other number by number.

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest difference relative to a tensor's largest entry, by the least exact type that took part. Shared-out sums are
summed in another order: a few hundred roundings of 1e-16 or 6e-8."""

_COARSE_TOLERANCE = 5e-2  # largest relative difference of 16-bit numbers: 2^-8 per rounding, some ten of them

_FLOOR = 1e-3
"""Tensors whose entries are all below this part of the largest of any are compared as if they were that large: some
gradients are zero but for rounding (of the keys' biases under softmax, for example)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """One run: what came out, and the gradients of inputs and parameters."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor | None, ...]
    parameters: dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The whole run, to which those of ranks are compared."""

    result: CheckedRun
    sizes: Mapping[str, float]  # the largest entry of each of its tensors, by its name in messages
    tolerance: float  # the largest difference relative to these

    @classmethod
    def of(cls, result: CheckedRun, coarsest: torch.dtype) -> "Reference":
        """A run that was computed in no coarser type than this one."""
        sizes = {name: 0.0 if tensor is None else _largest(tensor) for name, tensor in _named(result).items()}
        return cls(result=result, sizes=sizes, tolerance=_TOLERANCES.get(coarsest, _COARSE_TOLERANCE))

    def difference(
        self, ranks: Sequence[CheckedRun], splits: Sequence[ParameterSplit], summands: Container[str] = ()
    ) -> str | None:
        """What differs most on any rank, in words; None if nothing does by more than the tolerance.

        Of the gradients of parameters in ``summands`` every rank has one that adds up to the whole one.
        """
        wanted, of_name = _named(self.result), {_gradient_of(split.name): split for split in splits}
        worst, text = self.tolerance, None
        added = {_gradient_of(name): _added(ranks, name) for name in self.result.parameters if name in summands}
        for rank, result in enumerate(ranks):
            found = _named(result)
            if found.keys() != wanted.keys():
                return f"rank {rank} gives {len(found)} results and gradients instead of {len(wanted)}"
            for name, tensor in wanted.items():
                part, given = tensor, added.get(name, found[name])
                if tensor is not None and given is not None and name in of_name:
                    split = of_name[name]
                    if tuple(given.shape) != split.local_shape(tuple(tensor.shape), len(ranks)):
                        return f"the {name} has shape {tuple(given.shape)} on rank {rank}"
                    part = part_of(tensor, split, rank, len(ranks))
                relative = _relative(part, given, max(self.sizes[name], self._floor(name)))
                if not relative <= worst:
                    worst = relative
                    text = f"the {name} differs by {relative:.1e} of its size, the tolerance is {self.tolerance:.0e}"
        return text

    def _floor(self, name: str) -> float:
        kind = next(kind for kind in _KINDS if name.startswith(kind))
        return _FLOOR * max(size for other, size in self.sizes.items() if other.startswith(kind))


_KINDS = ("result", "gradient of input", "gradient of parameter")
"""What is compared; sizes of one kind are compared with each other."""


def _gradient_of(name: str) -> str:
    return f"{_KINDS[2]} {name}"


def _added(ranks: Sequence[CheckedRun], name: str) -> Tensor | None:
    given = [gradient for result in ranks if (gradient := result.parameters[name]) is not None]
    return torch.stack(given).sum(0) if given else None


def _named(result: CheckedRun) -> dict[str, Tensor | None]:
    return {
        **{f"{_KINDS[0]} {index}": tensor for index, tensor in enumerate(result.outputs)},
        **{f"{_KINDS[1]} {index}": tensor for index, tensor in enumerate(result.inputs)},
        **{_gradient_of(name): tensor for name, tensor in result.parameters.items()},
    }


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    return max(-low.item(), high.item()) if low.isfinite() and high.isfinite() else float("nan")


def _relative(expected: Tensor | None, found: Tensor | None, size: float) -> float:
    """Largest difference relative to a size; not a number if there are entries that are none."""
    if expected is None or found is None:
        alone = found if expected is None else expected
        return 0.0 if alone is None or not _largest(alone) else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    gap = _largest(expected - found)
    return 0.0 if gap == 0 else gap / size if size else float("inf")


CPU = torch.device("cpu")

Values = dict[str, tuple[Tensor, tuple[Slot, ...]]]
"""A parameter's values and slots by its name."""

Leaves = tuple[tuple[int, int], ...]
"""Results that lie on the ranks in parts, as ``(leaf, dim)``."""

Run: TypeAlias = Callable[[Mapping[str, Tensor], SplitContext | None, Any], tuple[CheckedRun, Leaves, torch.dtype]]
"""Runs a part of a module, whole or (in a context) as one rank, given what gradients arrive in, and how blocks are
entered with their input in parts along the sequence, if they are; the last is the coarsest type that took part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """What a check found.

    Attributes:
        gathered: Operations that worked on whole tensors for want of a rule for parts, with how often.
        largest_gather: The most numbers that ranks put together at once.
    """

    reason: str | None = None  # why the shared-out computation may not be used; None if it may
    gathered: tuple[tuple[str, int], ...] = ()
    sequence_leaves: Leaves = ()
    largest_gather: int = 0

    def slow(self, what: str) -> list[str]:
        """Where a step loses time, in words for the user."""
        return [
            f"{what} for {operation} ({count} times per run): right, but slower" for operation, count in self.gathered
        ]


class Check(Protocol):
    """Compares a part of a module with its run over ranks."""

    def __call__(
        self, splits: Sequence[ParameterSplit], degree: int, sequence: Any = None, adds_later: bool = False
    ) -> CheckOutcome:
        """Given the parameters that are shared out and the number of ranks.

        Args:
            sequence: How blocks are entered with their input in parts along the sequence, if they are.
            adds_later: Whether gradients of what all ranks hold are added up later, as context parallelism has it.
        """


def prepare(call: BlockCall, dtype: torch.dtype) -> Check:
    """Give a block numbers and run it whole; how to check it. Any error of the block itself is raised."""

    @contextmanager
    def room() -> Iterator[None]:
        with unchanged(call.block):
            convert_plain_tensors(call.block, dtype, CPU)
            yield

    compared = checked(numbers(call.block, dtype, seed=1), room, partial(run_block, call, dtype))
    # For want of a rule ranks may gather, which is told; with rules for all they do where layers do not match, and
    # what is as large as the result takes the time that sharing out is to save. Biases are smaller.
    limit = prod(_shape(call)) if call.hidden is not None else 0

    def check(
        splits: Sequence[ParameterSplit], degree: int, sequence: SequenceSplit | None = None, adds_later: bool = False
    ) -> CheckOutcome:
        found = compared(splits, degree, sequence, adds_later)
        if found.reason is None and sequence is None and not found.gathered and 0 < limit <= found.largest_gather:
            told = (
                f"ranks put {found.largest_gather} numbers together that other layers do not read in parts, as many as "
                "results"
            )
            return replace(found, reason=told)
        return found

    return check


def checked(values: Values, room: Callable[[], AbstractContextManager[None]], run: Run) -> Check:
    """Run a part of a module whole, and how to check it: run by as many ranks, each compared with the whole run.

    Args:
        room: Makes the context in which it runs, and behind which it is as before.
    """
    with room():
        tensors, shown = leaves_of(values)
        install(values, shown)
        expected, _, coarsest = run(tensors, None, None)
    reference = Reference.of(expected, coarsest)

    def check(
        splits: Sequence[ParameterSplit], degree: int, sequence: Any = None, adds_later: bool = False
    ) -> CheckOutcome:
        def of_rank(group: ThreadGroup) -> tuple[CheckedRun, CheckOutcome]:
            tensors, shown, context = share_out(
                values, splits, group, sequence_parallel=bool(sequence), adds_later=adds_later
            )
            install(values, shown)
            result, leaves, _ = run(tensors, context, sequence)
            gathered = tuple(sorted(context.gathered.items()))
            return result, CheckOutcome(gathered=gathered, sequence_leaves=leaves, largest_gather=group.largest_gather)

        with room():
            try:
                with functions_of_wholes():
                    ranks = run_ranks(degree, of_rank)
            except Exception as error:
                return CheckOutcome(reason=f"{type(error).__name__}: {error}")
        of_leaves, summands = _splits_of_leaves(values, splits)
        if adds_later:
            summands = frozenset(reference.result.parameters)
        reason = reference.difference([result for result, _ in ranks], of_leaves, summands)
        return replace(ranks[0][1], reason=reason, largest_gather=max(found.largest_gather for _, found in ranks))

    return check


def numbers(module: nn.Module, dtype: torch.dtype, seed: int, *, without: Container[int] = ()) -> Values:
    """Values for the parameters of a module, but for those that are left out by ``id``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            Factored.random(parameter, dtype, generator)
            if is_factored(parameter)
            else filled(parameter, dtype, generator),
            slots,
        )
        for name, (parameter, slots) in slots_of(module).items()
        if id(parameter) not in without
    }


def leaves_of(values: Values, ranks: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors that gradients arrive in, and what slots shall hold; for one of so many ranks."""
    leaves: dict[str, Tensor] = {}
    shown: dict[str, Tensor] = {}
    room = FactoredRoom(MOST_BYTES // ranks)
    for name, (value, _) in values.items():
        if isinstance(value, Factored):
            factors = [factor.detach().requires_grad_() for factor in (value.left, value.right)]
            leaves |= zip(_factors_of(name), factors, strict=True)
            shown[name] = Factored(factors[0], factors[1], room)
        else:
            leaves[name] = shown[name] = value.detach().requires_grad_(value.is_floating_point())
    return leaves, shown


def _factors_of(name: str) -> tuple[str, str]:
    return f"{name} (left factor)", f"{name} (right factor)"


def _splits_of_leaves(values: Values, splits: Sequence[ParameterSplit]) -> tuple[list[ParameterSplit], frozenset[str]]:
    """Splits of what gradients arrive in, and the leaves of whose gradients ranks have summands."""
    found: list[ParameterSplit] = []
    summands: set[str] = set()
    for split in splits:
        value = values[split.name][0]
        if isinstance(value, Factored):
            factors = _factors_of(split.name)
            shared = split.dim % value.dim() - (value.dim() - 2)
            found.append(replace(split, name=factors[shared], dim=value.dim() - 2))
            summands.add(factors[1 - shared])
        else:
            found.append(split)
    return found, frozenset(summands)


def share_out(
    values: Values,
    splits: Sequence[ParameterSplit],
    group: ThreadGroup,
    *,
    sequence_parallel: bool,
    adds_later: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor], SplitContext]:
    """One rank's leaves by parameter name, what its slots shall hold, and the context of its parts.

    The ranks share one module: behind every wait for others a rank puts its own tensors into the slots again.
    """
    tensors, shown = leaves_of(values, group.size)
    context = SplitContext(group, sequence_parallel=sequence_parallel)

    def resume() -> None:
        if context.function is not None:
            group.callers[function_name(context.function)] += 1
        install(values, shown)

    group.adds_later, group.resume = adds_later, resume
    of_leaves, _ = _splits_of_leaves(values, splits)
    for split, of_leaf in zip(splits, of_leaves, strict=True):
        full = tensors[of_leaf.name].detach()
        part = part_of(full, of_leaf, group.rank, group.size).detach()
        part.requires_grad_(full.is_floating_point())
        tensors[of_leaf.name] = part
        value = shown[split.name]
        if isinstance(value, Factored):
            left, right = (tensors[name] for name in _factors_of(split.name))
            part = Factored(left, right, value.room)
        shown[split.name] = present(part, split, context)
    return tensors, shown, context


def install(values: Values, shown: Mapping[str, Tensor]) -> None:
    """Put one rank's tensors into the slots."""
    for name, (_, slots) in values.items():
        put(slots, shown[name])


def run_block(
    call: BlockCall,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor],
    context: SplitContext | None = None,
    sequence: SequenceSplit | None = None,
) -> tuple[CheckedRun, Leaves, torch.dtype]:
    """Forward and backward of a filled block; its results in parts, and the coarsest type."""
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(2)
    args, kwargs, inputs = arguments(call, dtype, generator)
    leaves: Leaves = ()
    with torch.enable_grad():
        if context is not None:
            args, kwargs = _entered(args, kwargs, context, sequence)
        with WithoutDropout() as mode, without_hooks(context):
            output = call.block(*args, **kwargs)
        if context is not None:
            _refuse_mixed_tokens(context)
            dim = None if sequence is None else sequence.dim
            leaves = tuple(
                (index, leaf.shared_dim)
                for index, leaf in enumerate(tree_flatten(output)[0])
                if isinstance(leaf, SplitTensor) and leaf.shape == _shape(call)
            )
            if other := [each for _, each in leaves if each != dim]:
                raise TraceError(f"its result comes in parts along dimension {other[0]}, which the next takes whole")
            output = leaving(output, context)
    outputs = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    given = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in outputs]
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    wanted = [*inputs, *(tensors[name] for name in names)]
    gradients = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
    result = CheckedRun(
        outputs=tuple(leaf.detach() for leaf in outputs),
        inputs=gradients[: len(inputs)],
        parameters=dict(zip(names, gradients[len(inputs) :], strict=True)),
    )
    return result, leaves, mode.coarsest


def _entered(args: Any, kwargs: Any, context: SplitContext, sequence: SequenceSplit | None) -> tuple[Any, Any]:
    """A block's arguments as one rank's block is to see them."""
    args, kwargs = tree_map_only(Tensor, lambda leaf: enter(leaf, context.group), (args, kwargs))
    return (args, kwargs) if sequence is None else enter_sequence(args, kwargs, sequence, context)


class _WithoutHooks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.register_hook:
            raise TraceError(
                "the step puts a hook on a tensor: under context parallelism it would see what one rank adds to a "
                "gradient and not the gradient"
            )
        return func(*args, **(kwargs or {}))


def without_hooks(context: SplitContext | None) -> AbstractContextManager[object]:
    """Inside, hooks on tensors are refused where ranks would have summands of gradients."""
    return _WithoutHooks() if context is not None and context.adds_later else nullcontext()


ATTENTION = functional.scaled_dot_product_attention.__name__
"""The one function of a block that may mix tokens of ranks that share a row."""


def _refuse_mixed_tokens(context: SplitContext) -> None:
    """Raise where context-parallel ranks needed each other's tokens for anything but attention."""
    assert isinstance(context.group, ThreadGroup)
    if not context.adds_later:
        return
    mixing = sorted({*context.gathered, *context.group.callers} - ({ATTENTION} - context.gathered.keys()))
    if mixing:
        raise TraceError(
            f"tokens that lie on different ranks meet in {', '.join(mixing)}: outside of {ATTENTION} every token must "
            "be computed by itself, by functions that are known to do so"
        )


def _shape(call: BlockCall) -> tuple[int, ...]:
    return () if call.hidden is None else tuple(tree_flatten((call.args, call.kwargs))[0][call.hidden].shape)


def arguments(
    call: BlockCall, dtype: torch.dtype, generator: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """A block's arguments on the host in a floating-point type, and those of them that want gradients.

    What the block transforms is disturbed a little: where parameters have no values, all its positions may be equal.
    """
    flat, structure = tree_flatten((call.args, call.kwargs))
    inputs = []
    for index, leaf in enumerate(flat):
        if not isinstance(leaf, Tensor):
            continue
        flat[index] = convert(leaf, dtype, CPU)
        if leaf.is_floating_point() and (call.depends[index] or index == call.hidden):
            flat[index] += 0.5 * torch.randn(leaf.shape, generator=generator).to(dtype)
            flat[index].requires_grad_()
            inputs.append(flat[index])
    args, kwargs = tree_unflatten(flat, structure)
    return args, kwargs, inputs
