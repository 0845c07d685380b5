"""Tables of tokens: embeddings shared out along their rows and output layers whose logits feed a cross entropy.

Found by watching the step, blocks answering without running; checked by running head and tail shared out and whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_mist.model.fakes import (
    WithoutDropout,
    convert,
    convert_batch,
    convert_plain_tensors,
    intercepted,
    isolated,
    kept_slots,
    slots_of,
)
from lightning_mist.model.operator_costs import LinearCall, LinearMode
from lightning_mist.model.split.block_calls import BlockCalls, Call, valued
from lightning_mist.model.split.compare_ranks import Reference, Result
from lightning_mist.model.split.split_check import (
    CPU,
    Outcome,
    RankRun,
    Trial,
    install,
    leaves_of,
    numbers,
    run_over_ranks,
    share_out,
    without_hooks,
)
from lightning_mist.model.trace import echo, loss_of
from lightning_mist.plan.calls import without_caches
from lightning_mist.plan.tensor_split import ParameterSplit, SequenceSplit
from lightning_mist.tensor_parallel import SplitContext, TensorGroup, enter_sequence, leaving
from lightning_mist.tensors import copy_batch

_LOSSES = (functional.cross_entropy, functional.log_softmax, torch.log_softmax, Tensor.log_softmax)
"""What compares the entries of a row of logits with each other; has a rule for logits in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A parameter with one row for every token."""

    name: str
    dim: int  # the dimension along which rows lie
    rows: int
    bias: str | None  # a bias of as many entries that is added to the logits, if there is one

    def splits(self) -> tuple[ParameterSplit, ...]:
        """The table, and its bias, shared out along rows."""
        factors = ((self.rows, True),)
        own = ParameterSplit(name=self.name, dim=self.dim, factors=factors)
        return (own,) if self.bias is None else (own, ParameterSplit(name=self.bias, dim=0, factors=factors))


class _Tables(LinearMode):
    """Watches which parameters are looked up in, and which products reach a cross entropy without another product."""

    def __init__(self, parameters: Mapping[int, Tensor]) -> None:
        super().__init__(parameters)
        self._leaves: list[tuple[Tensor, LinearCall]] = []
        self.heads: dict[int, LinearCall] = {}
        self.lookups: dict[int, Tensor] = {}

    def answer(self, call: LinearCall, compute: Callable[[], Any]) -> Any:
        leaf = 0.1 * torch.randn(call.output_shape, dtype=call.input.dtype, device=call.input.device)
        leaf.requires_grad_()
        self._leaves.append((leaf, call))
        return leaf.clone()

    def other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func is functional.embedding and len(args) > 1 and id(args[1]) in self.parameters:
            self.lookups[id(args[1])] = args[1]
        if func in _LOSSES and isinstance(args[0] if args else None, Tensor) and args[0].requires_grad and self._leaves:
            leaves = [leaf for leaf, _ in self._leaves]
            touched = torch.autograd.grad(args[0].sum(), leaves, retain_graph=True, allow_unused=True)
            for gradient, (_, call) in zip(touched, self._leaves, strict=True):
                if gradient is not None and gradient.any():
                    self.heads[id(call.weight)] = call
        return func(*args, **kwargs)


def find_tables(
    module: nn.Module, call: Call, calls: BlockCalls, names: tuple[str, ...], *, answer: bool
) -> tuple[Table, ...]:
    """The tables worth sharing out: of more rows than columns, used outside of blocks."""
    blocks = [module.get_submodule(name) for name in names]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    with isolated(module), valued(module, calls.batch) as parameters:
        shown = {id(tensors): name for name, (tensors, _) in slots_of(module).items()}
        mode = _Tables({key: tensor for key, tensor in parameters.items() if key not in inside})
        with intercepted(blocks, _handler(calls, _as_given, answer=answer)), torch.enable_grad(), mode:
            call(copy_batch(calls.batch, with_tensors=True))
    tables: dict[str, Table] = {}
    for linear in mode.heads.values():
        rows, columns = linear.weight.shape[linear.output_dim], linear.width
        if rows >= columns and linear.rows == rows:
            bias = shown.get(id(linear.bias)) if linear.bias is not None and linear.bias.shape == (rows,) else None
            name = shown[id(linear.weight)]
            tables[name] = Table(name=name, dim=linear.output_dim, rows=rows, bias=bias)
    sizes = {table.rows for table in tables.values()}
    for weight in mode.lookups.values():
        name = shown[id(weight)]
        if weight.shape[0] in sizes:
            tables.setdefault(name, Table(name=name, dim=0, rows=weight.shape[0], bias=None))
    tied = [tables[shown[key]] for key in mode.lookups if shown[key] in tables]
    return tuple(table for table in tables.values() if table not in tied or table.dim == 0)


def prepare_glue(
    module: nn.Module, call: Call, calls: BlockCalls, names: tuple[str, ...], dtype: torch.dtype, *, answer: bool
) -> Trial:
    """Give head and tail numbers, and blocks unless answered for, and run them whole; raises the step's errors."""
    blocks = tuple(module.get_submodule(name) for name in names)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    values = numbers(module, dtype, seed=3, without=inside if answer else ())
    batch = convert_batch(calls.batch, lambda tensor: convert(tensor, dtype, CPU))
    with isolated(module), kept_slots(module), valued(module, batch):
        convert_plain_tensors(module, dtype, CPU)
        tensors, shown = leaves_of(values)
        install(values, shown)
        with intercepted(blocks, _handler(calls, _as_given, answer=answer)):
            expected, coarsest = _run(call, batch, tensors)
    reference = Reference.of(expected, coarsest)

    def check(
        splits: Sequence[ParameterSplit], degree: int, sequence: Sequence[SequenceSplit], adds_later: bool = False
    ) -> Outcome:
        turn: list[SplitContext] = []
        """Of the rank that runs now."""

        def take_turn(context: SplitContext) -> None:
            turn[:] = [context]

        def enter(position: int, args: Any, kwargs: Any) -> Any:
            return enter_sequence(args, kwargs, sequence[position], turn[0]) if sequence else (args, kwargs)

        def run(group: TensorGroup) -> RankRun:
            parallel = bool(sequence)
            tensors, shown, context = share_out(
                values, splits, group, sequence_parallel=parallel, adds_later=adds_later, also=take_turn
            )
            take_turn(context)
            install(values, shown)
            result, _ = _run(call, batch, tensors, context)
            return result, tuple(sorted(context.gathered.items())), ()

        with isolated(module), kept_slots(module), valued(module, batch):
            convert_plain_tensors(module, dtype, CPU)
            with intercepted(blocks, _handler(calls, enter, answer=answer)):
                return run_over_ranks(reference, values, splits, degree, run, adds_later=adds_later)

    return Trial(values=values, reference=reference, check=check)


def _as_given(position: int, args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _handler(calls: BlockCalls, enter: Callable[[int, Any, Any], Any], *, answer: bool) -> Callable[..., Any]:
    """Changes the arguments of blocks, and answers for them unless they are to run."""

    def handler(position: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = enter(position, *without_caches(args, kwargs))
        if not answer:
            return forward(*args, **kwargs)
        example = calls.examples[calls.kinds.of[position]]
        if example.answer is None:
            raise TypeError(f"{type(example.block).__name__} returns what cannot be described")
        return echo(example.answer, args, kwargs, example.hidden)

    return handler


def _run(
    call: Call, batch: Any, tensors: Mapping[str, Tensor], context: SplitContext | None = None
) -> tuple[Result, torch.dtype]:
    torch.manual_seed(0)
    with torch.enable_grad():
        with WithoutDropout() as mode, without_hooks(context):
            output = call(copy_batch(batch, with_tensors=True))
        loss = loss_of(output if context is None else leaving(output, context))
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    gradients = torch.autograd.grad(loss, [tensors[name] for name in names], allow_unused=True)
    result = Result(outputs=(loss.detach(),), inputs=(), parameters=dict(zip(names, gradients, strict=True)))
    return result, mode.coarsest
