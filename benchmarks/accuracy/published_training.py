"""Training loops of others, run again without data: one device, data parallel, or fully sharded (torch's FSDP1).

What a step does follows Hugging Face's ``Trainer`` and Lightning Fabric's loops: forward and backward for every batch
of an accumulation, the optimizer's own code, gradients to None. Sharded runs wrap every layer, and the rest as root.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy.published_device import SimulatedDevice
from benchmarks.accuracy.published_models import Model, Shapes, Weights

Result = tuple[Tensor, Tensor | None]
"""What a part of a model gives: its output, and what is kept of it until the forward ends."""

STEPS = 3
"""Optimizer state exists from the second step on; a third repeats the second on the memory that it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model is trained.

    Attributes:
        batch, length, accumulation: Rows of a batch on one device, tokens of a row, batches of a step.
        recomputes: Whether every layer is recomputed in backward.
        is_reentrant: Whether by the older, reentrant implementation.
        optimizer: ``"adamw"`` or ``"sgd"``.
        kind: ``"foreach"``, ``"fused"`` or ``"for-loop"``.
        is_paged: Whether optimizer state lies in managed memory, which the allocator does not see.
        is_8bit: Whether both moments have one byte an element (bitsandbytes).
        steps_in_backward: Whether every weight is updated, and its gradient freed, as soon as the gradient is there.
        sharding: ``"none"``, ``"ddp"`` or ``"fsdp1"``.
        world: Devices.
        holds_logits: Whether the loop's variables keep the logits until the next forward has made new ones.
        tensors_per_batch: Integer tensors of a batch (tokens, labels, mask).
    """

    batch: int
    length: int
    accumulation: int = 1
    recomputes: bool = False
    is_reentrant: bool = True
    optimizer: str = "adamw"
    kind: str = "foreach"
    is_paged: bool = False
    is_8bit: bool = False
    steps_in_backward: bool = False
    sharding: str = "none"
    world: int = 1
    holds_logits: bool = False
    tensors_per_batch: int = 3


class PlainUnit:
    """Weights of a layer or the root that are there all the time.

    Args:
        device: Where.
        shapes: Shapes by name.
        dtype: Of the weights.
        has_buckets: Whether gradients are copied into buckets that stay (``DistributedDataParallel``).
    """

    def __init__(self, device: SimulatedDevice, shapes: Shapes, dtype: torch.dtype, *, has_buckets: bool) -> None:
        """Allocate the weights."""
        self.weights = {name: nn.Parameter(torch.empty(s, dtype=dtype, device="meta")) for name, s in shapes.items()}
        numel = sum(weight.numel() for weight in self.weights.values())
        self.buckets = torch.empty(numel if has_buckets else 0, dtype=dtype, device="meta")

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        return list(self.weights.values())

    def run(self, call: Callable[[Weights], Result], before: "PlainUnit | None") -> Result:
        """Run a part of the model with the weights."""
        return call(self.weights)

    def give_gradients(self) -> None:
        """Parameters have them."""

    def forget_gradients(self) -> None:
        """After a step."""


class FlatUnit:
    """Weights in one flat parameter, of which every rank has a shard (``FlatParamHandle`` of torch's FSDP1).

    Args:
        device: Where.
        shapes: Shapes by name.
        dtype: Of the shard and of the gradient's.
        computes: Of the whole weights and their gradients, which are reduced in it (``MixedPrecision``).
        world: Ranks that share it. Alone, nothing is sharded (``NO_SHARD``).
        is_root: Whether it stays whole between forward and backward.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        shapes: Shapes,
        dtype: torch.dtype,
        *,
        computes: torch.dtype,
        world: int,
        is_root: bool,
    ) -> None:
        """Allocate the shard."""
        self.computes = computes
        self.device, self.shapes, self.world, self.is_root = device, shapes, world, is_root
        self.numels = [torch.Size(shape).numel() for shape in shapes.values()]
        self.shard_numel = -(-sum(self.numels) // world)
        self.numel = self.shard_numel * world
        self.shard = torch.empty(self.shard_numel, dtype=dtype, device="meta")
        with device.paused():
            whole = self.shard if world == 1 else torch.empty(self.numel, dtype=computes, device="meta")
        self.flat = nn.Parameter(whole)
        self.flat.register_post_accumulate_grad_hook(self._after_backward)  # type: ignore[arg-type]
        self.gradient: Tensor | None = None
        self.syncs = True
        self.parameters = [nn.Parameter(part) for part in self._parts(self.shard)]

    def run(self, call: Callable[[Weights], Result], before: "FlatUnit | None") -> Result:
        """Gather, run, free; in backward gather this one, and the one whose backward is next."""
        self._gather()
        pieces = self.flat.split([*self.numels, self.numel - sum(self.numels)])
        pairs = zip(self.shapes.items(), pieces, strict=False)
        out, kept = call({name: piece.view(shape) for (name, shape), piece in pairs})
        if not self.is_root:
            self._free()
        if out.requires_grad:
            out.register_hook(lambda _: self._before_backward(before))
        return out, kept

    def give_gradients(self) -> None:
        """Hand the gradient's shard to the parameters as views of it."""
        if self.gradient is not None:
            for parameter, part in zip(self.parameters, self._parts(self.gradient), strict=True):
                parameter.grad = part

    def forget_gradients(self) -> None:
        """After a step."""
        self.gradient = self.flat.grad = None

    def _parts(self, shard: Tensor) -> list[Tensor]:
        """What of every weight lies in the first rank's shard."""
        ends = [min(sum(self.numels[: i + 1]), self.shard_numel) for i in range(len(self.numels))]
        starts = [0, *ends[:-1]]
        return [shard[start:end] for start, end in zip(starts, ends, strict=True) if end > start]

    def _gather(self) -> None:
        if self.world > 1 and not self.device.has_memory(self.flat):
            with self.device.on("unshard"):
                cast = self.shard.to(self.computes)  # itself if the types are equal; gone when all have been gathered
                self.device.hold(self.flat)
                del cast

    def _free(self) -> None:
        if self.world > 1 and self.device.has_memory(self.flat):
            self.device.drop(self.flat)

    def _before_backward(self, before: "FlatUnit | None") -> None:
        self._gather()
        if before is not None:
            before._gather()

    def _after_backward(self, _: Tensor) -> None:
        self._free()
        if not self.syncs:
            return
        whole = self.flat.grad
        assert whole is not None
        if self.world == 1:
            self.gradient = whole
            return
        with self.device.on("reduce"):
            shard = torch.empty_like(self.shard, dtype=self.computes).to(self.shard.dtype)
        self.flat.grad = None
        self.gradient = shard if self.gradient is None else self.gradient.add_(shard)


class Trainer:
    """A model, its states, and steps.

    Args:
        device: Where it runs.
        model: The model.
        training: How it is trained.
    """

    def __init__(self, device: SimulatedDevice, model: Model, training: Training) -> None:
        """Allocate weights and buffers."""
        self.device, self.model, self.training = device, model, training
        dtype = model.arithmetic.dtype
        shapes = [model.root] + [model.layer_shapes] * model.shape.layers
        self.units: list[PlainUnit | FlatUnit] = []
        for index, each in enumerate(shapes):
            if training.sharding == "fsdp1":
                computes, is_root = model.arithmetic.autocast or dtype, index == 0
                unit: PlainUnit | FlatUnit = FlatUnit(
                    device, each, dtype, computes=computes, world=training.world, is_root=is_root
                )
            else:
                unit = PlainUnit(device, each, dtype, has_buckets=training.sharding == "ddp" and training.world > 1)
            self.units.append(unit)
        self.buffers = torch.empty(model.buffer_bytes, dtype=torch.uint8, device="meta")
        parameters = [p for unit in self.units for p in unit.parameters]
        self.optimizers = [_optimizer(training, parameters)]
        if training.steps_in_backward:
            self.optimizers = [_optimizer(training, [p]) for p in parameters]
            for parameter, optimizer in zip(parameters, self.optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(_step_one, optimizer))
        self.logits: Tensor | None = None

    def step(self) -> None:
        """One optimizer step."""
        for index in range(self.training.accumulation):
            for unit in self.units:
                if isinstance(unit, FlatUnit):
                    unit.syncs = index == self.training.accumulation - 1
            shape = (self.training.tensors_per_batch, self.training.batch, self.training.length)
            batch = torch.empty(shape, dtype=torch.int64, device="meta")
            self.forward(batch[0]).backward()
            self.model.arithmetic.casts.clear()
        for unit in self.units:
            unit.give_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for unit in self.units:
            unit.forget_gradients()

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of a batch. The root's weights are used first and last."""
        root, layers = self.units[0], self.units[1:]

        def whole(weights: Weights) -> Result:
            x, shared = self.model.begin(weights, tokens)
            caches = []
            for index, unit in enumerate(layers):
                before = layers[index - 1] if index else None
                x, cache = self._layer(unit, x, shared, before)
                caches.append(cache)
            total, logits = self.model.end(weights, x, tokens)
            if self.training.holds_logits:
                self.logits = logits
            return total, None

        return root.run(whole, None)[0]  # type: ignore[arg-type]

    def _layer(
        self, unit: PlainUnit | FlatUnit, x: Tensor, shared: tuple[Tensor, ...], before: PlainUnit | FlatUnit | None
    ) -> Result:
        def layer(x: Tensor) -> Result:
            return unit.run(lambda weights: self.model.layer(weights, x, shared), before)  # type: ignore[arg-type]

        if not self.training.recomputes:
            return layer(x)
        reentrant = self.training.is_reentrant
        return checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)  # type: ignore[no-any-return]


def _step_one(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    """Update one weight in backward."""
    optimizer.step()
    optimizer.zero_grad()


def _optimizer(training: Training, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    foreach, fused = training.kind == "foreach", training.kind == "fused"
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, foreach=foreach, fused=fused)
    if fused or training.is_paged or training.is_8bit:
        return OneKernelAdamW(parameters, is_8bit=training.is_8bit, is_paged=training.is_paged)
    return torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)


class OneKernelAdamW(torch.optim.Optimizer):
    """What AdamW in one kernel allocates: its state and nothing else.

    ``torch.optim.AdamW(fused=True)`` has both moments and a step count on the device; the kernel itself does not run
    without one. bitsandbytes keeps moments of weights of at least 4096 elements in a byte each, with a float32 scale
    for every 256, and paged ones in memory that the allocator does not know of.

    Args:
        parameters: What it updates.
        is_8bit, is_paged: As in :class:`Training`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_8bit: bool, is_paged: bool) -> None:
        """No state yet."""
        super().__init__(parameters, {})
        self._is_8bit, self._is_paged = is_8bit, is_paged

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make the state that is missing."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state, numel = self.state[parameter], parameter.numel()
            if parameter.grad is None or state or self._is_paged:
                continue
            state["step"] = torch.zeros((), dtype=torch.float32, device="meta")
            for name in ("exp_avg", "exp_avg_sq"):
                if self._is_8bit and numel >= 4096:
                    state[name] = torch.zeros(numel, dtype=torch.uint8, device="meta")
                    state[f"{name}_scale"] = torch.zeros(-(-numel // 256), dtype=torch.float32, device="meta")
                else:
                    dtype = torch.float32 if self._is_8bit else parameter.dtype
                    state[name] = torch.zeros_like(parameter, dtype=dtype)
