"""How a step calls its blocks: the arguments of one call of every kind, on a batch as small as it will take."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.model.fakes import convert, isolated, put, resize_batch, slots_of, thin
from lightning_mist.model.operator_costs import LinearCall, LinearMode
from lightning_mist.model.trace import Kinds, group, imitate, module_key, record_answer
from lightning_mist.plan.calls import call_signature, intercepted, without_caches
from lightning_mist.tensors import batch_rows, batch_tensors, copy_batch, is_hollow, sequence_length
from lightning_mist.without_values import BlockAnswer

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
