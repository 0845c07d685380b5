"""One stage of an unmodified module.

Every stage runs the user's whole step. Parameters of other stages are replaced by *ghosts*: fake tensors, which have a
shape but no values. Whatever depends on them is a fake too, so the step runs at no cost up to the stage: blocks before
it are answered with ghosts of what they would return. On entry to the stage's first block the ghosts that are still
needed turn into the tensors that were received, wherever they are referred to. On entry to the first block of the next
stage the step is left by an exception, and the values that are still needed there are handed over. Everything that
does not depend on parameters (masks, positions, targets) is computed by every stage for itself.

A value that was not carried stays a ghost, and a ghost among the results is an error: a wrong cut is not silent.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_mist.errors import TraceError
from lightning_mist.plan.calls import (
    ValueNames,
    block_value,
    call_signature,
    describe_value,
    is_block_value,
    is_simple,
    results,
    select,
    without_caches,
)
from lightning_mist.plan.module_map import LiveTensor, ModuleMap
from lightning_mist.runtime.checkpointing import checkpoint_block, neutral_checkpointing
from lightning_mist.runtime.random import get_random_state, set_random_state

_INDEXING = frozenset(("__getitem__", "__setitem__", "masked_select"))

_MAX_RECIPES = 16384
"""Remembered answers of skipped blocks, about 1 KB each; forgotten all at once beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A tensor that a stage will receive.

    Attributes:
        shape: Its shape for this call.
        dtype: Its element type.
        device: Where it must be.
        requires_grad: Whether a gradient must be sent back.
        batch_dim: The dimension that grows with the batch, or None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """What a stage's forward gave.

    Attributes:
        tensors: The tensors to send, in the order of the map's cut, attached to the graph; empty on the last stage.
        value: What the user's step returned, on the last stage.
    """

    tensors: tuple[Tensor, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to answer for a skipped block; without structure the block must run on ghosts each time."""

    leaves: tuple[tuple[Any, ...], ...]
    structure: TreeSpec | None


class _Exit(BaseException):
    """Leaves the user's step; passes ``except Exception``."""


class _Enter(torch.autograd.Function):
    """A received tensor as an inner node of the graph, which may be written to in place as in the uncut module."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Run:
    """One run of the step: where it is, and the values found so far that are wanted."""

    def __init__(self, wanted: frozenset[Hashable], received: Sequence[Tensor] | None) -> None:
        self.wanted, self.received = wanted, received
        self.names = ValueNames()
        self.objects: dict[Hashable, Tensor] = {}
        self.region = -1
        self.inside: int | None = None
        self.is_quiet = False
        self.error: TraceError | None = None

    def fail(self, message: str) -> _Exit:
        """An exception that user code does not swallow; the error is raised once the step is left."""
        self.error = TraceError(message)
        return _Exit()


class _Watcher(TorchFunctionMode):
    """Finds wanted values among the results of torch functions, and indexes ghosts by masks."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run, kwargs = self._run, kwargs or {}
        if run.is_quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", type(func).__name__)
        if name in _INDEXING and isinstance(args[0], FakeTensor):
            func, args = select(name, func, args, _is_known_mask)
        output = func(*args, **kwargs)
        made = [leaf for leaf in results(name, args, output) if isinstance(leaf, Tensor)]
        if made:
            base = run.names.next("glue" if run.inside is None else "inner", run.region, name)
            for leaf, tensor in enumerate(made):
                if (*base, leaf) in run.wanted:
                    run.objects[(*base, leaf)] = tensor
        return output


class GhostStage:
    """One stage of a module.

    Args:
        module: The user's module with all its parameters.
        module_map: Its map; from the same module.
        bounds: The layer range of every stage.
        index: This stage.
        checkpointed_layers: How many of the stage's first blocks are recomputed in backward.

    Attributes:
        parameters: The parameters that this stage computes with, or keeps for others, by canonical name.
        foreign: All others.

    Raises:
        TraceError: If the map is of another module, or rules out what is asked for.
    """

    parameters: dict[str, nn.Parameter]
    foreign: dict[str, nn.Parameter]

    def __init__(
        self,
        module: nn.Module,
        module_map: ModuleMap,
        bounds: tuple[tuple[int, int], ...],
        index: int,
        *,
        checkpointed_layers: int = 0,
    ) -> None:
        self._module, self._map, self._bounds, self.index = module, module_map, bounds, index
        self._first, self._end = bounds[index]
        self._num_stages = len(bounds)
        self._checkpointed = range(self._first, self._first + checkpointed_layers)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._check()
        named = dict(module.named_parameters())
        owners = module_map.owners(bounds)
        self.parameters = {name: p for name, p in named.items() if index in owners[name]}
        self.foreign = {name: p for name, p in named.items() if name not in self.parameters}
        self._device = next((p.device for p in named.values()), torch.device("cpu"))
        self._ghosts = self._make_ghosts(named)
        modules = dict(module.named_modules())
        self._recurrent = [
            child
            for child in modules.values()
            if isinstance(child, nn.RNNBase) and any(space is child._parameters for space, *_ in self._ghosts)
        ]
        self._blocks = [modules[name] for name in module_map.blocks]
        self._receives = module_map.cuts[self._first - 1] if index > 0 else ()
        self._sends = module_map.cuts[self._end - 1] if index < self._num_stages - 1 else ()
        self._wanted = frozenset(live.key for live in (*self._receives, *self._sends))
        self._inner = frozenset(key[1] for key in self._wanted if isinstance(key, tuple) and key[0] == "inner")
        self._is_watched = not all(is_block_value(key) for key in self._wanted) or (
            index > 0 and module_map.indexes_by_mask
        )
        self._recipes: dict[Hashable, _Recipe] = {}
        self._specs: dict[Hashable, tuple[InputSpec, ...]] = {}
        self._originals: dict[int, Callable[..., Any]] = {}
        self._run: _Run | None = None

    # --------------------------------------------------------------------------------------------------- construction

    def _check(self) -> None:
        names = tuple(name for name, _ in self._module.named_parameters())
        mapped = tuple(use.name for use in self._map.parameters)
        if names != mapped:
            different = sorted(set(names) ^ set(mapped))
            raise TraceError(
                f"the module has {len(names)} parameters and its map {len(mapped)}, of which {different[:3]} differ: the "
                "map must be of the same module"
            )
        reasons = self._map.excludes("pipeline")
        if self._num_stages > 1 and reasons:
            raise TraceError(f"{self._num_stages} stages: {reasons[0]}. Use a plan with one stage")
        reasons = self._map.excludes("checkpointing")
        if self._checkpointed and reasons:
            raise TraceError(f"checkpointed_layers = {len(self._checkpointed)}: {reasons[0]}. Use 0")
        if self._num_stages > 1 and self._bounds[-1][1] != len(self._map.blocks):
            raise TraceError(
                f"the stages hold {self._bounds[-1][1]} layers, the module has {len(self._map.blocks)}: they must agree"
            )

    def _make_ghosts(self, named: dict[str, nn.Parameter]) -> list[tuple[dict[str, Any], str, nn.Parameter, Any]]:
        """For every slot that other stages use: its dictionary, its name, its ghost and its parameter."""
        if self._num_stages == 1:
            return []
        modules = dict(self._module.named_modules())
        ghosts = []
        for use in self._map.parameters:
            parameter = named[use.name]
            ghost: nn.Parameter | None = None
            for module_name, attribute, regions in use.slots:
                stages = {self._stage_of(region) for region in regions}
                if self.index in stages or (not stages and use.name in self.parameters):
                    continue
                ghost = ghost if ghost is not None else self._ghost_of(parameter)
                ghosts.append((modules[module_name]._parameters, attribute, ghost, parameter))
        return ghosts

    def _stage_of(self, region: int) -> int:
        return next((i for i, (_, end) in enumerate(self._bounds) if region < end), self._num_stages - 1)

    def _ghost_of(self, parameter: nn.Parameter) -> nn.Parameter:
        is_hollow = parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size()
        with self._mode:
            if is_hollow:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            else:
                data = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                )
        return nn.Parameter(data, requires_grad=False)

    # ---------------------------------------------------------------------------------------------------- the module

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the module is this stage; afterwards it is exactly as before."""
        if self._originals:
            raise RuntimeError(f"stage {self.index} is attached already: leave the context first")
        for space, name, ghost, _ in self._ghosts:
            space[name] = ghost
        weights = [(child, child._flat_weights) for child in self._recurrent]
        for child in self._recurrent:
            # Recurrent layers keep their weights in a list besides.
            child.__dict__["_flat_weights"] = [child._parameters.get(name) for name in child._flat_weights_names]
        positions = range(len(self._blocks)) if self._num_stages > 1 else self._checkpointed
        wrapped = []
        for position in positions:
            space = self._blocks[position].__dict__
            wrapped.append((space, space.get("forward")))
            self._originals[position] = self._blocks[position].forward
            space["forward"] = self._wrap(position)
        try:
            yield
        finally:
            self._originals.clear()
            for space, forward in wrapped:
                space.pop("forward", None)
                if forward is not None:
                    space["forward"] = forward
            for child, flat in weights:
                child.__dict__["_flat_weights"] = flat
            for space, name, _, parameter in self._ghosts:
                space[name] = parameter

    def hollow(self) -> None:
        """Free the storage of the parameters that other stages hold; they keep their shape."""
        for parameter in self.foreign.values():
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            parameter.data = zero.expand(parameter.shape)
            parameter.grad = None

    # --------------------------------------------------------------------------------------------------------- running

    def input_specs(self, call: Callable[[], Any], signature: Hashable) -> tuple[InputSpec, ...]:
        """What the stage will receive for a call, in the order of the map's cut; nothing on stage 0.

        The call is run up to the stage's first block unless one of the same signature was. Random generators are left
        as they were. The stage must be attached.

        Args:
            call: Runs the user's step on its batch; what it does to its batch it will do again in :meth:`forward`.
            signature: Equal for batches whose tensors have equal shapes.

        Raises:
            TraceError: If the step does not get there, or lacks a value that it had in the trace.
        """
        if self.index == 0:
            return ()
        key = (signature, torch.is_grad_enabled(), self._module.training, self._context())
        specs = self._specs.get(key)
        if specs is None:
            state = get_random_state(self._device)
            run = _Run(self._wanted, None)
            self._enter(run, call)
            set_random_state(state, self._device)
            specs = tuple(self._spec(live, run.objects[live.key]) for live in self._receives)
            self._specs[key] = specs
        return specs

    def _spec(self, live: LiveTensor, tensor: Tensor) -> InputSpec:
        return InputSpec(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=live.requires_grad and torch.is_grad_enabled(),
            batch_dim=live.batch_dim,
        )

    def forward(self, call: Callable[[], Any], received: Sequence[Tensor]) -> StageOutput:
        """Run the stage's part of the user's step. The stage must be attached.

        Random numbers that the stage's part draws continue from the generators' states at this call.

        Args:
            call: Runs the user's step on its batch.
            received: The tensors that :meth:`input_specs` announced; leaves, in which gradients will arrive.

        Raises:
            TraceError: If the step runs its blocks in another order than in the trace, ends before the stage does, or
                gives a result that depends on a parameter of another stage.
        """
        if self._num_stages == 1 and not self._checkpointed:
            return StageOutput(tensors=(), value=call())
        run = _Run(self._wanted, received)
        value, is_complete = self._enter(run, call)
        if self._num_stages == 1:
            return StageOutput(tensors=(), value=value)
        if self.index == self._num_stages - 1:
            self._check_value(value)
            return StageOutput(tensors=(), value=value)
        if is_complete:
            raise TraceError(
                f"the step returned after layer {run.region} without calling layer {self._end} "
                f"({self._map.blocks[self._end]}), where stage {self.index} ends: every step must call every block, and "
                "may not catch BaseException around them"
            )
        return StageOutput(tensors=tuple(self._sent(run, live) for live in self._sends), value=None)

    def _enter(self, run: _Run, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Run the step; its value, and whether it ran to its end."""
        if not self._originals:
            raise RuntimeError(f"stage {self.index} is not attached: run it inside attached()")
        state = get_random_state(self._device) if self.index > 0 else None
        self._run, self._state = run, state
        try:
            with ExitStack() as stack:
                stack.enter_context(neutral_checkpointing())
                if self._is_watched:
                    stack.enter_context(_Watcher(run))
                value, is_complete = call(), True
        except _Exit:
            value, is_complete = None, False
        finally:
            self._run = self._state = None
        if run.error is not None:
            raise run.error
        if run.region < self._first and self._num_stages > 1:
            raise TraceError(
                f"the step returned after layer {run.region} without calling layer {self._first} "
                f"({self._map.blocks[self._first]}), where stage {self.index} begins: every step must call every block"
            )
        return value, is_complete

    def _wrap(self, position: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            run, original = self._run, self._originals[position]
            if run is None or run.inside is not None:
                return original(*args, **kwargs)
            if self._num_stages > 1:
                self._arrive(run, position)
            return self._run_block(run, position, original, args, kwargs)

        return forward

    def _arrive(self, run: _Run, position: int) -> None:
        """Check the order of blocks, leave the step at the stage's end, and take in what was received."""
        if position != run.region + 1:
            raise run.fail(
                f"layer {position} ({self._map.blocks[position]}) was called after layer {run.region}: blocks must run in "
                "the order of the trace, each once"
            )
        if position == self._end:
            raise _Exit
        run.region = position
        if position == self._first and self.index > 0:
            if run.received is None:
                for live in self._receives:
                    self._found(run, live)
                raise _Exit
            self._receive(run, run.received)

    def _run_block(
        self, run: _Run, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if torch.is_grad_enabled() or self._num_stages > 1:
            args, kwargs = without_caches(args, kwargs)
        is_local = position >= self._first or self._num_stages == 1
        run.inside, run.is_quiet = position, is_local and position not in self._inner
        try:
            if not is_local:
                output = self._answer(position, original, args, kwargs)
            elif position in self._checkpointed and torch.is_grad_enabled():
                output = checkpoint_block(original, args, kwargs)
            else:
                output = original(*args, **kwargs)
        finally:
            run.inside, run.is_quiet = None, False
        if self._wanted:
            for leaf, value in enumerate(tree_flatten(output)[0]):
                if block_value(position, leaf) in self._wanted and isinstance(value, Tensor):
                    run.objects[block_value(position, leaf)] = value
        return output

    # ------------------------------------------------------------------------------------------------- skipped blocks

    def _context(self) -> Hashable:
        kind = self._device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _answer(self, position: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block before the stage returns, in ghosts."""
        if position in self._map.leaking_blocks:
            return original(*args, **kwargs)
        inputs = tree_flatten((args, kwargs))[0]
        key = (position, call_signature(inputs), self._blocks[position].training, self._context())
        recipe = self._recipes.get(key)
        if recipe is None:
            output = original(*args, **kwargs)
            if len(self._recipes) >= _MAX_RECIPES:
                self._recipes.clear()
            self._recipes[key] = _recipe(output, inputs)
            return output
        if recipe.structure is None:
            return original(*args, **kwargs)
        return tree_unflatten([self._leaf(leaf, inputs) for leaf in recipe.leaves], recipe.structure)

    def _leaf(self, leaf: tuple[Any, ...], inputs: list[Any]) -> Any:
        if leaf[0] == "input":
            return inputs[leaf[1]]
        if leaf[0] == "value":
            return leaf[1]
        _, shape, stride, dtype, device = leaf
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    # ------------------------------------------------------------------------------------------------------ boundaries

    def _found(self, run: _Run, live: LiveTensor) -> Tensor:
        tensor = run.objects.get(live.key)
        if tensor is None:
            raise run.fail(
                f"stage {self.index}: the {describe_value(live.key)} was not computed in this step, but it was in the "
                "trace: every step must take the same path through the model's code"
            )
        return tensor

    def _receive(self, run: _Run, received: Sequence[Tensor]) -> None:
        """Turn the ghosts of what crosses the cut into what was received."""
        if len(received) != len(self._receives):
            raise run.fail(f"stage {self.index} was given {len(received)} tensors: {len(self._receives)} cross its cut")
        for live, tensor in zip(self._receives, received, strict=True):
            ghost = self._found(run, live)
            if ghost.shape != tensor.shape or ghost.dtype != tensor.dtype:
                raise run.fail(
                    f"stage {self.index} received the {describe_value(live.key)} as {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}, but its own batch gives {ghost.dtype} of shape {tuple(ghost.shape)}: the "
                    "stages must run the same batch"
                )
            if live.requires_grad and torch.is_grad_enabled():
                tensor.requires_grad_(True)
                _become(ghost, _Enter.apply(tensor))  # type: ignore[no-untyped-call]
            else:
                _become(ghost, tensor.detach())
        if self._state is not None:
            # Blocks of other stages drew no numbers here, and what was drawn before does not count.
            set_random_state(self._state, self._device)

    def _sent(self, run: _Run, live: LiveTensor) -> Tensor:
        tensor = run.objects.get(live.key)
        if tensor is None or isinstance(tensor, FakeTensor):
            what = "was not computed in this step" if tensor is None else "depends on a value that was not carried"
            raise TraceError(
                f"stage {self.index}: the {describe_value(live.key)} {what}: every step must take the same path through "
                "the model's code as the trace"
            )
        if tensor.requires_grad and not live.requires_grad and torch.is_grad_enabled():
            raise TraceError(
                f"stage {self.index}: the {describe_value(live.key)} requires a gradient now and did not in the trace: "
                "parameters may not be unfrozen after planning; plan again with them unfrozen"
            )
        return tensor

    def _check_value(self, value: Any) -> None:
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, FakeTensor):
                raise TraceError(
                    f"stage {self.index}: what the step returned (shape {tuple(leaf.shape)}) depends on a parameter of "
                    "another stage through a value that was not carried: this step took another path than the trace"
                )


def _is_known_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == torch.bool and not isinstance(item, FakeTensor)


def _recipe(output: Any, inputs: list[Any]) -> _Recipe:
    """How to give a block's output again for equal arguments."""
    positions = {id(leaf): index for index, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
    leaves, structure = tree_flatten(output)
    described: list[tuple[Any, ...]] = []
    for leaf in leaves:
        if id(leaf) in positions:
            described.append(("input", positions[id(leaf)]))
        elif isinstance(leaf, FakeTensor):
            described.append(("tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device))
        elif not isinstance(leaf, Tensor) and is_simple(leaf):
            described.append(("value", leaf))
        else:
            return _Recipe((), None)
    return _Recipe(tuple(described), structure)


def _become(target: Tensor, source: Tensor) -> None:
    """Turn the object ``target`` into the tensor ``source``, wherever it is referred to.

    torch.utils.swap_tensors refuses objects with weak references; the ones here lead from a fake tensor mode's memory
    to a ghost that no longer exists.
    """
    target.__class__, source.__class__ = source.__class__, target.__class__
    target.__dict__, source.__dict__ = source.__dict__, target.__dict__
    torch._C._swap_tensor_impl(target, source)
